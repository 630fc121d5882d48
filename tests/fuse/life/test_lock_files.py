"""Lock files, which programs open with O_TRUNC before they lock them."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.support.clients.callers import Caller
from tests.support.clients.stepping import until
from tests.support.kernel.calls import read_file, write_file
from tests.support.mounts.places import blank_place, small_mount

TRUNCATE: Final = os.O_RDWR | os.O_CREAT | os.O_TRUNC
PROCESSES: Final = 4
ROUNDS: Final = 25
#: Of the processes whose server is killed so many times meanwhile.
KILLED_ROUNDS: Final = 40
KILLS: Final = 2
#: What filelock did up to 3.29: it empties the file, locks it without waiting, and tries again.
_LIKE_FILELOCK: Final = """
import fcntl, os, sys, time
lock, counter, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
for _ in range(rounds):
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            os.close(fd)
            time.sleep(0.0005)
    with open(counter) as file:
        count = int(file.read())
    with open(counter + ".new", "w") as file:
        file.write(str(count + 1))
    os.rename(counter + ".new", counter)
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)
"""
#: As scripts do; the one that has the lock says so in its file.
_LIKE_SHELLS: Final = """
set -e
for _ in $(seq "$3"); do
    exec 9>"$1"
    flock 9
    [ -z "$4" ] || echo $$ >&9
    read -r count <"$2"
    echo $((count + 1)) >"$2.new"
    mv "$2.new" "$2"
    exec 9>&-
done
"""


def counted_in(directory: Path) -> int:
    """Return how far the processes got that count there."""
    return int(read_file(directory / "counter"))


def count_together(
    command: list[str],
    kv: Path,
    *options: str,
    rounds: int = ROUNDS,
    meanwhile: Callable[[], None] = lambda: None,
) -> int:
    """Let processes count under one lock; return how far they got."""
    counter = kv / "counter"
    write_file(counter, b"0\n")
    words = [*command, str(kv / "LOCK"), str(counter), str(rounds), *options]
    counting = [
        subprocess.Popen(words, stderr=subprocess.PIPE, text=True) for _ in range(PROCESSES)
    ]
    meanwhile()
    errors = [one.communicate()[1] for one in counting]
    assert errors == [""] * PROCESSES, "no ESTALE reaches a program"
    return counted_in(kv)


@pytest.mark.parametrize("before", [None, b"", b"123\n"], ids=["none", "empty", "written"])
def test_a_lock_file_opened_with_o_trunc_excludes(kv: Path, before: bytes | None) -> None:
    """[locks-truncate] Four processes count to 100, as filelock locks."""
    if before is not None:
        write_file(kv / "LOCK", before)
    assert count_together([sys.executable, "-c", _LIKE_FILELOCK], kv) == PROCESSES * ROUNDS


@pytest.mark.parametrize("says", ["", "pid"], ids=["empty", "with a pid"])
def test_a_lock_file_of_shells_excludes(kv: Path, says: str) -> None:
    """[locks-truncate] ``exec 9>LOCK; flock 9``, with and without the number of its holder."""
    assert count_together(["bash", "-c", _LIKE_SHELLS, "sh"], kv, says) == PROCESSES * ROUNDS


@pytest.mark.parametrize("program", ["filelock", "shells"])
@pytest.mark.parametrize("data_path", ["daemon", "passthrough"])
def test_a_lock_file_excludes_while_servers_are_killed(data_path: str, program: str) -> None:
    """[locks-truncate] Who is sharing the file goes on sharing it under the next server."""
    command, options = {
        "filelock": ([sys.executable, "-c", _LIKE_FILELOCK], ()),
        "shells": (["bash", "-c", _LIKE_SHELLS, "sh"], ("pid",)),
    }[program]
    with blank_place() as place, small_mount(place, f"--data-path={data_path}") as mounted:

        def kill_servers() -> None:
            for kill in range(1, KILLS + 1):
                goal = kill * PROCESSES * KILLED_ROUNDS // (KILLS + 2)
                until(lambda goal=goal: counted_in(mounted.path) >= goal, "they count on")
                mounted.kill_server()
                mounted.follow_server()

        counted = count_together(
            command, mounted.path, *options, rounds=KILLED_ROUNDS, meanwhile=kill_servers
        )
    assert counted == PROCESSES * KILLED_ROUNDS


@pytest.mark.parametrize("kind", ["flock", "lockf"])
def test_a_pid_file_with_a_lock_is_emptied_in_place(kv: Path, kind: str) -> None:
    """[locks-truncate] A second instance finds the lock, as on XFS, and not a file of its own."""
    path = str(kv / "daemon.pid")
    with Caller() as first, Caller() as second:
        held = first.os("open", path, TRUNCATE, 0o644)
        first.fcntl(kind, held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        first.os("write", held, b"4711\n")
        fd = second.os("open", path, TRUNCATE, 0o644)
        with pytest.raises(BlockingIOError):
            second.fcntl(kind, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert first.os("fstat", held).st_ino == second.os("fstat", fd).st_ino
        assert read_file(Path(path)) == b""
