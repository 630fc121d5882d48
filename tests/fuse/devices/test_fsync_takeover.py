"""An fsync that is honoured, and ``kvfs sync``, across the end of a server: then the power goes.

The XFS below is shut down by force with all that it holds in memory, so what comes back is what the
drive had when the call returned.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from mount.fuse.wire import Opcode
from tests.fuse.conftest import PATHS, pool_source, require_passthrough
from tests.support.devices.power_cuts.power import Cut, shut_down
from tests.support.kernel.caches import pool_root
from tests.support.kills.killed_inside import killed_inside
from tests.support.mounts.changed_version import Tree
from tests.support.mounts.mounting import Mounted, kernel_has_passthrough, run_kvfs, workplace

pytestmark = [
    pytest.mark.needs_fuse,
    pytest.mark.needs_loop,
    pytest.mark.skipif(not kernel_has_passthrough(), reason="the kernel sends nothing again"),
]

BLOCK: Final = bytes(range(256)) * 256
COUNT: Final = 40
#: Nothing becomes durable by itself.
FLAGS: Final = ("--fsync=honour", "--set", "durable_within_s=0")


@pytest.fixture(params=PATHS)
def place(request: pytest.FixtureRequest) -> Iterator[tuple[str, Path, str]]:
    """A drive, a directory beside it, and the data path."""
    if request.param == "native":
        pytest.skip("a declared difference: there is no server")
    with pool_source("xfs") as source, workplace() as directory:
        yield source, directory, request.param


@contextlib.contextmanager
def served(place: tuple[str, Path, str]) -> Iterator[Mounted]:
    """A mount there whose power may be cut."""
    source, directory, path = place
    with Mounted(source, directory / "kv", f"--data-path={path}", *FLAGS) as mounted:
        if path == "passthrough":
            require_passthrough(mounted)
        yield mounted


def store(directory: Path, count: int = COUNT) -> None:
    directory.mkdir()
    for number in range(count):
        (directory / f"{number}.tmp").write_bytes(BLOCK)
        (directory / f"{number}.tmp").rename(directory / str(number))


def fsync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_a_draft(directory: Path) -> None:
    """As who writes a block does, before its close and its rename."""
    with (directory / "next.tmp").open("xb") as file:
        file.write(BLOCK)
        file.flush()
        os.fsync(file.fileno())


def sync_by_command(directory: Path) -> None:
    run_kvfs("sync", str(directory))


def kill(mounted: Mounted) -> None:
    """Kill the server; the next call on the mount waits for another one, and commands do not."""
    mounted.kill_server()


def kill_and_follow(mounted: Mounted) -> None:
    mounted.kill_server()
    mounted.follow_server()


def upgrade(mounted: Mounted) -> None:
    run_kvfs("upgrade", str(mounted.path))


def cut_power(mounted: Mounted) -> None:
    """Take the power away, and start on what the drive has."""
    mounted.adopt()
    root = os.open(pool_root(mounted), os.O_RDONLY | os.O_DIRECTORY)
    try:
        mounted.kill_daemon()  # its mappings end first: a dirty page would be a SIGBUS
        shut_down(root, Cut.NOTHING)
    finally:
        os.close(root)
    mounted.start()


def whole(directory: Path, names: list[str]) -> list[str]:
    """Return which of *names* are there, whole."""
    found = []
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            assert (directory / name).read_bytes() == BLOCK
            found.append(name)
    return found


NAMES: Final = [str(number) for number in range(COUNT)]


@pytest.mark.parametrize(
    ("end", "wait"),
    [
        (kill, fsync_directory),
        (kill, fsync_a_draft),
        pytest.param(upgrade, fsync_directory, marks=pytest.mark.proof),
        (kill_and_follow, sync_by_command),
        (upgrade, sync_by_command),
    ],
)
def test_what_was_stored_before_is_durable_when_it_returns(
    place: tuple[str, Path, str], end: Callable[[Mounted], None], wait: Callable[[Path], None]
) -> None:
    with served(place) as mounted:
        store(mounted.path / "d")
        end(mounted)
        wait(mounted.path / "d")
        cut_power(mounted)
        assert whole(mounted.path / "d", NAMES) == NAMES


def test_a_block_that_is_read_is_durable_when_an_fsync_returns(
    place: tuple[str, Path, str],
) -> None:
    """A reader is no writer, whoever has the extent open for it."""
    with served(place) as mounted:
        directory = mounted.path / "d"
        store(directory)
        with (directory / "0").open("rb") as read, (directory / "1").open("rb") as other:
            assert read.read(4096) == BLOCK[:4096]
            os.fsync(other.fileno())
            assert read.read(4096) == BLOCK[4096:8192]
        cut_power(mounted)
        assert whole(directory, NAMES) == NAMES


def test_a_server_of_a_version_without_that_memory_came_between(
    place: tuple[str, Path, str], tmp_path: Path
) -> None:
    """[durable-taken-over] What the supervisor holds is older than what that one stored."""
    tree = Tree(tmp_path)
    path = "mount/process/succession.py"
    tree.change(path, "    if _UNDURABLE in given:", "    if False:")
    tree.change(path, "    held.hold(_UNDURABLE, empty_fd)\n", "")
    with served(place) as mounted:
        done = tree.kvfs("upgrade", str(mounted.path))
        assert done.returncode == 0, done.stderr
        store(mounted.path / "d")
        upgrade(mounted)
        fsync_directory(mounted.path / "d")
        cut_power(mounted)
        assert whole(mounted.path / "d", NAMES) == NAMES


@pytest.mark.parametrize("point", ["committed", "announced"])
def test_a_name_of_the_request_that_the_server_died_in(
    place: tuple[str, Path, str], point: str
) -> None:
    """A block that is durable under its former name, and a rename that was in the index alone."""
    source, directory, path = place
    with (
        pytest.MonkeyPatch.context() as patch,
        killed_inside(source, directory, patch, f"--data-path={path}", *FLAGS) as inside,
    ):
        mounted = inside.mounted
        store(mounted.path / "d", 1)
        fsync_directory(mounted.path / "d")
        inside.kill_at(point, Opcode.RENAME)
        (mounted.path / "d" / "0").rename(mounted.path / "d" / "new")
        fsync_directory(mounted.path / "d")
        inside.assert_killed()
        cut_power(mounted)
        assert whole(mounted.path / "d", ["0", "new"]) == ["new"]
