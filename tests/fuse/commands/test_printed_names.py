"""Names steer no terminal and forge no line: whoever may store a file chooses its name."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.cli.status_table import tables
from tests.support.mounts.mounting import Mounted, run_kvfs, skip_without_mounts
from tests.support.mounts.places import blank_place, small_mount

pytestmark = pytest.mark.needs_fuse

#: It clears the screen, and says on a line of its own that all is well.
HOSTILE = "a\x1b[2J\n  none  \x9b31m\u202ey"
FORGED = "  none"


@pytest.fixture(scope="module")
def hostile() -> Iterator[Mounted]:
    """A mount on which a directory of that name holds most, and a process has a file of it open."""
    skip_without_mounts()
    with blank_place() as place, small_mount(place) as mounted:
        directory = mounted.path / HOSTILE
        directory.mkdir()
        (directory / HOSTILE).write_bytes(bytes(235 << 20))
        with open(directory / HOSTILE, "rb"):
            yield mounted


def is_harmless(printed: str) -> bool:
    """Whether *printed* holds no control characters, and no line is the name's."""
    lines = printed.splitlines()
    return all(line.isprintable() and not line.startswith(FORGED) for line in lines)


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("status", ("{kv}",)),
        ("status", ()),
        ("doctor", ("{kv}",)),
        ("evict", ("{kv}", "--bytes", "1G")),
        ("evict", ("{kv}/" + HOSTILE,)),
        ("pin", ("{kv}/" + HOSTILE + "/none",)),
        ("pin", ("--list", "{kv}")),
        ("evict", ("{kv}", "--match", HOSTILE)),
        ("pin", ("{kv}", "--match", "none/" + HOSTILE)),
        ("unpin", ("{kv}/" + HOSTILE,)),
        ("warm", ("{kv}", "--dry-run")),
        ("warm", ("{kv}/" + HOSTILE + "/none",)),
        ("fsck", ("{kv}/" + HOSTILE,)),
        ("umount", ("{kv}",)),
    ],
)
def test_no_verb_prints_a_name_raw(hostile: Mounted, verb: str, arguments: tuple[str, ...]) -> None:
    command = [argument.format(kv=hostile.path) for argument in arguments]
    done = run_kvfs(verb, *command, check=False)
    assert done.stdout + done.stderr
    assert is_harmless(done.stdout), done.stdout
    assert is_harmless(done.stderr), done.stderr


def test_status_still_names_the_directory(hostile: Mounted) -> None:
    printed = run_kvfs("status", str(hostile.path)).stdout
    assert r"a\x1b[2J\n  none" in printed
    assert hostile.status()["largest_unevictable"]["directory"] == "/" + HOSTILE


@pytest.mark.real_exec
@pytest.mark.parametrize("locale", ["LC_ALL=C", "LC_ALL=C.UTF-8", "PYTHONCOERCECLOCALE=0"])
def test_names_that_are_not_ascii_are_read_whatever_the_locale(
    hostile: Mounted, locale: str
) -> None:
    """What a name holds that is no text is shown as a shell takes it in $'...', byte by byte."""
    prefix = ("env", "-u", "LANG", "-u", "LC_CTYPE", "-u", "LC_ALL", locale)
    prefix += ("PYTHONUTF8=0",) if "COERCE" in locale else ()
    for name, shown in ((b"caf\xc3\xa9", "café"), (b"caf\xe9", r"caf\xe9")):
        path = os.fsdecode(os.fsencode(hostile.path) + b"/" + name)
        done = run_kvfs("evict", path, prefix=prefix, check=False)
        as_ascii = shown.replace("é", r"\xe9")
        assert done.stderr in [
            f"kvfs: there is no {one} on this mount\n" for one in (shown, as_ascii)
        ]
        assert "udc" not in done.stderr


def test_a_newer_servers_figures_are_escaped_too() -> None:
    told = {"mountpoint": HOSTILE, HOSTILE: {HOSTILE: HOSTILE}, "states": {HOSTILE: {HOSTILE: 1}}}
    for lines in tables(told, 80):
        assert is_harmless("\n".join(lines))


def test_the_log_escapes_what_it_is_told(tmp_path: Path) -> None:
    """Every line of the log begins with its time, whatever a message or an error holds."""
    program = f"""\
import logging
from kvfs.core.settings import Settings
from mount.process.logs import set_up_logging, close_logging
set_up_logging(Settings(log_file={str(tmp_path / "log")!r}), background=True)
log = logging.getLogger("kvfs")
log.error("lost: %s", {HOSTILE!r})
try:
    raise OSError({HOSTILE!r})
except OSError as error:
    log.error("failed", exc_info=error)
close_logging()
"""
    run_python(program)
    first, *others = (tmp_path / "log").read_text().splitlines()
    assert is_harmless(first)
    assert first.endswith(r"lost: a\x1b[2J\n  none  \x9b31m\u202ey")
    assert all(line.isprintable() for line in others)
    failed, *traceback = others
    assert failed.endswith("failed")
    assert traceback
    assert all(line.startswith("  ") for line in traceback)
    assert not any(line.startswith(FORGED) for line in traceback)


def run_python(program: str) -> None:
    """Run *program* as a process of its own: it sets up the logging of its process."""
    subprocess.run([sys.executable, "-c", program], check=True)
