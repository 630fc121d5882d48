"""Times never go backwards, whoever stamps them: this server, or the kernel by its own clock."""

import contextlib
import mmap
import os
import subprocess
from pathlib import Path

import pytest

TRIES = 60


def touch(path: Path) -> None:
    """Set both times to now, or create it."""
    path.touch()


def write(path: Path) -> None:
    """Write some bytes."""
    path.write_bytes(b"x")


def rewrite(path: Path) -> None:
    """Write some bytes without truncating."""
    with path.open("r+b") as file:
        file.write(b"y")


def empty(path: Path) -> None:
    """Truncate it by its name."""
    os.truncate(path, 0)


def change_mode(path: Path) -> None:
    """Change what only ctime tells of."""
    path.chmod(0o600)


def rename(path: Path) -> None:
    """Move it away and back."""
    path.rename(path.with_suffix(".moved"))
    path.with_suffix(".moved").rename(path)


def modified_s(path: Path) -> int:
    """Ask for mtime alone, as stat(1) does by statx(2)."""
    return int(subprocess.check_output(["stat", "--format=%Y", path]))


CHANGES = [touch, write, rewrite, touch, rename, empty, change_mode, touch, rewrite]


@pytest.mark.parametrize("first", [0, 1, 2])
def test_times_of_a_file_never_go_backwards(kv: Path, first: int) -> None:
    """[times] Each change right behind another one, and behind the creation."""
    backwards = []
    for number in range(TRIES):
        path = kv / f"{number}"
        path.touch()
        before = path.stat()
        for change in CHANGES[first:] + CHANGES[:first]:
            change(path)
            after = path.stat()
            if after.st_mtime_ns < before.st_mtime_ns or after.st_ctime_ns < before.st_ctime_ns:
                backwards.append((number, change.__name__))
            before = after
    assert not backwards


def test_a_store_through_a_mapping_shows_its_time(kv: Path) -> None:
    """[times] [mmap] Also to who asks for nothing else: a mapping makes only atime old."""
    path = kv / "slab"
    path.write_bytes(bytes(1 << 20))
    os.utime(path, (1, 1))
    assert modified_s(path) == 1
    with path.open("r+b") as file, contextlib.closing(mmap.mmap(file.fileno(), 0)) as memory:
        assert modified_s(path) == 1
        memory[:4] = b"data"
        memory.flush()
        assert modified_s(path) > 1
    assert modified_s(path) > 1
    assert path.read_bytes()[:4] == b"data"


def test_times_of_a_directory_never_go_backwards(kv: Path) -> None:
    """[times] Names come and go in it, and it is touched."""
    backwards = []
    before = kv.stat()
    for number in range(2 * TRIES):
        touch(kv / f"{number}" if number % 2 else kv)
        after = kv.stat()
        backwards.append(after.st_mtime_ns < before.st_mtime_ns)
        before = after
    assert not any(backwards)
