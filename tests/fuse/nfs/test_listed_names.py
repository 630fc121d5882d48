"""A file server looks for each name that it has just been shown, and names may go at any time.

A program of a server's name stands for Ganesha, which reads some rows of a directory and then looks
for each of them, on one thread.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.fuse.conftest import require_passthrough
from tests.support.kernel.calls import write_file
from tests.support.mounts.mounting import Mounted, run_kvfs
from tests.support.mounts.places import blank_place, small_mount

pytestmark = pytest.mark.needs_fuse

SERVER: Final = "a-file-server"
#: Shown all names of a directory, it looks for one of them after the other, as it is told.
LIST: Final = """
import os, sys, time
directory = sys.argv[1]
fd = os.open(directory, os.O_RDONLY)
print(*sorted(os.listdir(fd)), flush=True)
for line in sys.stdin:
    name = line.strip()
    try:
        told = os.stat(name, dir_fd=fd)
        again = os.stat(name, dir_fd=fd)
        print("found", told.st_ino, again.st_size, flush=True)
    except OSError as error:
        print(type(error).__name__, flush=True)
"""
NAMES: Final = tuple(f"block-{number}" for number in range(6))
SIZE: Final = 5000


@pytest.fixture(scope="module", params=["daemon", "passthrough"])
def mounted(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    flags = (f"--data-path={request.param}", "--set", f"file_servers={SERVER}")
    with blank_place() as place, small_mount(place, *flags) as made:
        if request.param == "passthrough":
            require_passthrough(made)
        yield made


class Lister:
    """A process that has listed a directory."""

    def __init__(self, program: Path, directory: Path) -> None:
        shutil.copy(os.path.realpath(sys.executable), program)
        self._process = subprocess.Popen(
            [program, "-S", "-c", LIST, directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONHOME": sys.base_prefix},
            text=True,
        )
        self.listed = self._line().split()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def look(self, name: str) -> str:
        """Return what it finds under *name*."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        return self._line()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


@pytest.fixture
def directory(mounted: Mounted) -> Iterator[Path]:
    made = mounted.path / "listed"
    made.mkdir()
    for name in NAMES:
        write_file(made / f"{name}.tmp", bytes(SIZE))
        (made / f"{name}.tmp").rename(made / name)
    yield made
    shutil.rmtree(made)


def test_a_server_finds_for_a_moment_what_it_was_shown(
    mounted: Mounted, directory: Path, tmp_path: Path
) -> None:
    """[life-server-lists] As it was; nobody else does, nor the server what it was not shown."""
    inos = {name: os.stat(directory / name).st_ino for name in NAMES}
    server = Lister(tmp_path / SERVER, directory)
    try:
        assert server.listed == list(NAMES)
        for name in NAMES[:2]:  # quicker than a command, and a second is short
            os.unlink(directory / name)
        os.rename(directory / NAMES[2], directory / "moved")
        for name in NAMES[:3]:
            assert server.look(name) == f"found {inos[name]} {SIZE}"
            assert not (directory / name).exists()
        assert server.look("never") == "FileNotFoundError"
        assert server.look("moved") == f"found {inos[NAMES[2]]} {SIZE}"
    finally:
        server.close()


def test_another_program_finds_nothing(mounted: Mounted, directory: Path, tmp_path: Path) -> None:
    """[life-server-lists] It lists and looks as the server does."""
    other = Lister(tmp_path / "another-program", directory)
    try:
        os.unlink(directory / NAMES[0])
        assert other.look(NAMES[0]) == "FileNotFoundError"
    finally:
        other.close()


def test_the_moment_ends(mounted: Mounted, directory: Path, tmp_path: Path) -> None:
    """[life-server-lists] What was evicted is missing a second later."""
    server = Lister(tmp_path / SERVER, directory)
    try:
        run_kvfs("evict", str(directory / NAMES[0]))
        found = {server.look(NAMES[0]).split()[0]}
        while "FileNotFoundError" not in found:
            found.add(server.look(NAMES[0]).split()[0])
        assert found <= {"found", "FileNotFoundError"}
        assert server.look(NAMES[1]).startswith("found ")
    finally:
        server.close()
