"""Completion, asked of the real shells as a user asks: with a command that is not whole yet."""

import os
import pty
import re
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.cli.main import VERBS
from make.completion import PLACES, completions

WAIT_S: Final = 90.0
_CONTROL: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|[\r\x07\x08]")


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder laid out as /usr/local is, with a command called kvfs."""
    top = tmp_path_factory.mktemp("prefix")
    for place, text in completions().items():
        (top / place).parent.mkdir(parents=True)
        (top / place).write_text(text)
    (top / "bin").mkdir()
    (top / "bin" / "kvfs").write_text("#!/bin/sh\n")
    (top / "bin" / "kvfs").chmod(0o755)
    (top / "home" / "pool").mkdir(parents=True)
    return top


def environment(prefix: Path) -> dict[str, str]:
    return {
        "PATH": f"{prefix}/bin:{os.environ['PATH']}",
        "HOME": str(prefix / "home"),
        "XDG_DATA_DIRS": f"{prefix}/share:/usr/local/share:/usr/share",
        "TERM": "dumb",
        "LC_ALL": "C.UTF-8",
    }


def bash(prefix: Path, line: str) -> set[str]:
    """Return what its function offers for *line*."""
    script = (
        f"source {prefix}/{PLACES['bash']}; declare -a spec=($(complete -p kvfs)); "
        'read -ra COMP_WORDS <<<"$1"; [[ $1 == *" " ]] && COMP_WORDS+=(""); '
        "COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMP_LINE=$1; COMP_POINT=${#1}; "
        # complete -o ... -F FUNCTION kvfs
        '"${spec[-2]}" kvfs "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script, "bash", line],
        env=environment(prefix),
        cwd=prefix / "home",
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )
    return set(done.stdout.split())


def fish(prefix: Path, line: str) -> set[str]:
    """Return what its own completion offers for *line*."""
    done = subprocess.run(
        ["fish", "--private", "-c", f"complete -C '{line}'"],
        env=environment(prefix),
        cwd=prefix / "home",
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )
    return {row.partition("\t")[0] for row in done.stdout.splitlines()}


class Zsh:
    """An interactive one on a terminal of its own."""

    def __init__(self, prefix: Path) -> None:
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.chdir(prefix / "home")
            os.execvpe("zsh", ["zsh", "-f", "-i"], environment(prefix))
        self._said = ""
        place = prefix / Path(PLACES["zsh"]).parent
        self._type("PS1='> '; unsetopt zle_bracketed_paste; setopt list_rows_first\n")
        self._type(f"fpath=({place} $fpath); autoload -U compinit; compinit -u -D\n")
        # It lists at the first tab and asks nothing, however long the list is.
        self._type("LISTMAX=10000; setopt auto_list no_menu_complete; echo re''ady\n")
        self._await("ready")

    def offers(self, line: str) -> str:
        """Return what it shows after a tab behind *line*, and for ``echo`` after it."""
        self._said = ""
        self._type(f"{line}\t")
        self._type("\x05 ; echo do''ne\n")
        return re.sub(" +", " ", self._await("done"))

    def end(self) -> None:
        os.close(self._fd)
        os.waitpid(self._pid, 0)

    def _type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def _await(self, word: str) -> str:
        until_s = time.monotonic() + WAIT_S
        while f"{word}\n" not in self._said:
            left_s = until_s - time.monotonic()
            assert left_s > 0, self._said
            if select.select([self._fd], [], [], left_s)[0]:
                self._said += _CONTROL.sub("", os.read(self._fd, 65536).decode(errors="replace"))
        return self._said


@pytest.fixture(scope="module")
def zsh(prefix: Path) -> Iterator[Zsh]:
    shell = Zsh(prefix)
    yield shell
    shell.end()


@pytest.mark.parametrize("ask", [bash, fish])
class TestOffered:
    """In bash and fish, which say it without a terminal."""

    def test_verbs(self, ask: type, prefix: Path) -> None:
        assert ask(prefix, "kvfs ") >= set(VERBS)
        assert ask(prefix, "kvfs mou") == {"mount"}

    def test_flags_of_a_verb(self, ask: type, prefix: Path) -> None:
        assert {"--capacity", "--log-file"} <= ask(prefix, "kvfs mount --")
        assert ask(prefix, "kvfs umount --laz") == {"--lazy"}
        assert "--capacity" not in ask(prefix, "kvfs umount --")

    def test_values(self, ask: type, prefix: Path) -> None:
        assert ask(prefix, "kvfs mount --fsync ") == {"relaxed", "honour"}

    def test_paths(self, ask: type, prefix: Path) -> None:
        assert {one.rstrip("/") for one in ask(prefix, "kvfs mount poo")} == {"pool"}


def test_zsh_offers_verbs_flags_values_and_paths(zsh: Zsh) -> None:
    assert "kvfs mount ;" in zsh.offers("kvfs moun")
    assert "serve a pool at a mountpoint" in zsh.offers("kvfs m")
    assert "kvfs umount --lazy ;" in zsh.offers("kvfs umount --laz")
    assert "honour" in zsh.offers("kvfs mount --fsync ")
    assert "kvfs mount pool/ ;" in zsh.offers("kvfs mount poo")
