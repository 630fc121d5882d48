"""The golden table of messages per operation: the budget that keeps the hot path honest.

A row that needs more messages than it says has become slower; one that needs fewer is out of
date. Both fail. Names are those of enum fuse_opcode; FORGET is nobody's business.
"""

import contextlib
import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.fuse.conftest import require_passthrough
from tests.support.clients.stepping import until
from tests.support.kernel.calls import opened
from tests.support.kernel.message_counts import (
    Messages,
    ask_status,
    counted,
    message_counter,
    mounted_with,
)
from tests.support.mounts.mounting import Mounted

pytestmark = pytest.mark.needs_fuse

MIB: Final = 1 << 20
DATA: Final = os.urandom(MIB)
ALIGNED: Final = mmap.mmap(-1, MIB)
#: What a server without any store yet has ready (Forecast).
READY: Final = 2
Deed = Callable[[Path], object]


def store(directory: Path, name: str = "block") -> None:
    """One store cycle, as connectors do it: temporary name, one write, close, rename."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with opened(directory / f"{name}.tmp", flags) as fd:
        assert os.write(fd, DATA) == MIB
    os.rename(directory / f"{name}.tmp", directory / name)


def store_by_python(directory: Path) -> None:
    """The same with Python's own files."""
    with open(directory / "block.tmp", "xb") as file:
        file.write(DATA)
    os.replace(directory / "block.tmp", directory / "block")


def load(directory: Path) -> None:
    """os.open, one read, close."""
    with opened(directory / "block", os.O_RDONLY) as fd:
        assert os.read(fd, 2 * MIB) == DATA


def load_direct(directory: Path) -> None:
    """The same past the page cache."""
    with opened(directory / "block", os.O_RDONLY | os.O_DIRECT) as fd:
        assert os.readv(fd, [ALIGNED]) == MIB
    assert ALIGNED[:] == DATA


def load_by_python(directory: Path) -> None:
    """Python's open(), which asks whether the file is a terminal and for its size."""
    with open(directory / "block", "rb") as file:
        assert file.read() == DATA


def load_by_mmap(directory: Path) -> None:
    """A mapping that outlives the descriptor; mmap itself asks for the size."""
    with opened(directory / "block", os.O_RDONLY) as fd:
        memory = mmap.mmap(fd, MIB, access=mmap.ACCESS_READ)
    with contextlib.closing(memory):
        assert memory[:] == DATA


def stat(directory: Path) -> None:
    """One stat of a present name."""
    assert os.stat(directory / "block").st_size == MIB


def look(directory: Path) -> None:
    """What a connector asks before it loads."""
    assert os.path.exists(directory / "block")
    assert os.access(directory / "block", os.R_OK)
    stat(directory)


def miss(directory: Path) -> None:
    """What it asks of a block that nobody has stored."""
    assert not os.path.exists(directory / "absent")
    assert not os.access(directory / "absent", os.R_OK)
    with contextlib.suppress(FileNotFoundError):
        os.close(os.open(directory / "absent", os.O_RDONLY))


def write_often(directory: Path) -> None:
    """1,000 writes to a new file."""
    with opened(directory / "log", os.O_WRONLY | os.O_CREAT) as fd:
        for _ in range(1000):
            os.write(fd, DATA[:4096])


def rewrite_often(directory: Path) -> None:
    """1,000 writes into a published block, in place."""
    with opened(directory / "block", os.O_WRONLY) as fd:
        for at in range(1000):
            os.pwrite(fd, DATA[:64], at * 64)


def rewrite_whole(directory: Path) -> None:
    """O_TRUNC and one write."""
    with opened(directory / "block", os.O_WRONLY | os.O_TRUNC) as fd:
        os.write(fd, DATA)


def remove(directory: Path) -> None:
    """One unlink."""
    os.unlink(directory / "block")


def many(deed: Deed) -> Deed:
    """Return *deed* fifty times over."""

    def work(directory: Path) -> None:
        for _ in range(50):
            deed(directory)

    return work


def stored(directory: Path) -> None:
    """A block, and what the kernel asks about it once is known."""
    store(directory)
    stat(directory)


def loaded_afresh(directory: Path) -> None:
    """The same, and read from the server: the page cache may have it from the store.

    Whether it does is chance. The kernel drops it when the server tells of another mtime than that
    of the kernel's own tick, and the two differ only where a tick fell between create and write.
    """
    store(directory)
    with opened(directory / "block", os.O_RDONLY) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    load(directory)
    os.statvfs(directory)  # see loaded


def loaded(directory: Path) -> None:
    """A block that was read before."""
    store(directory)
    load(directory)
    # On the daemon path read(2) returns while the server still hands the bytes over; only when
    # it answers something else has the kernel noted that the file's atime is another now.
    os.statvfs(directory)


def missed(directory: Path) -> None:
    """A name known to be absent."""
    miss(directory)


def steady(directory: Path) -> None:
    """A directory in which blocks are being stored."""
    store(directory, "first")
    store(directory, "second")


def nothing(_directory: Path) -> None:
    """A new directory."""


class Row(NamedTuple):
    """What an operation costs after *before* was done in the same directory.

    ``by_libfuse`` are those of the messages that the fast lane leaves to pyfuse3's whole stack.
    """

    operation: str
    before: Deed
    act: Deed
    messages: str
    by_libfuse: str = ""


def operation_of(row: Row) -> str:
    """Return how pytest calls a row."""
    return row.operation


DRAFT: Final = "LOOKUP, CREATE, GETXATTR, FLUSH, RELEASE"
CYCLE: Final = f"{DRAFT}, GETATTR, LOOKUP, RENAME"
LISTING: Final = "OPENDIR, 2 READDIRPLUS, RELEASEDIR"
TABLE: Final = [
    # -- stores: the GETATTRs are of the directory, which every change of its names invalidates.
    Row("store, cold", nothing, store, CYCLE),
    Row("store, steady", steady, store, f"GETATTR, {CYCLE}"),
    Row("store over a block", loaded, store, CYCLE),
    Row("store by Python", nothing, store_by_python, f"{CYCLE}, IOCTL"),
    # -- loads
    Row("load, just stored", store, load, "GETATTR, OPEN, RELEASE"),
    Row("load", loaded, load, "OPEN, RELEASE"),
    Row("load, O_DIRECT", loaded, load_direct, "OPEN, RELEASE"),
    Row("load by Python", loaded, load_by_python, "OPEN, GETATTR, IOCTL, RELEASE"),
    Row("load by mmap", loaded, load_by_mmap, "OPEN, GETATTR, RELEASE"),
    Row("50 loads", loaded, many(load), "50 OPEN, 50 RELEASE"),
    # -- looks
    Row("stat, just stored", store, stat, "2 GETATTR"),
    Row("stat after a load", loaded, stat, "GETATTR"),
    Row("stat, exists, access", stored, many(look), ""),
    Row("first miss", nothing, miss, "LOOKUP"),
    Row("repeated misses", missed, many(miss), ""),
    # -- rare, but many messages would hurt
    Row("1000 writes", nothing, write_often, DRAFT),
    Row("1000 writes in place", stored, rewrite_often, "OPEN, GETXATTR, FLUSH, RELEASE", "OPEN"),
    Row(
        "rewrite",
        stored,
        rewrite_whole,
        "2 OPEN, 3 LOOKUP, GETATTR, 2 GETXATTR, FLUSH, RELEASE",
        "2 OPEN",
    ),
    Row("remove", stored, remove, "UNLINK", "UNLINK"),
    Row("list", stored, os.listdir, LISTING, "2 READDIRPLUS"),
]


def cached(directory: Path) -> None:
    """A block whose bytes the kernel has, after the GETATTR that their READs cost."""
    loaded(directory)
    stat(directory)


#: On the daemon path the bytes are messages, too, as many as the kernel's readahead likes.
BYTES: Final = ("READ", "WRITE")
DAEMON_TABLE: Final = [
    Row("store, steady", steady, store, f"GETATTR, {CYCLE}"),
    Row("load", cached, load, "OPEN, FLUSH, RELEASE"),
    Row("load by Python", cached, load_by_python, "OPEN, IOCTL, FLUSH, RELEASE"),
    Row("stat after a load", loaded_afresh, stat, "GETATTR"),
    Row("stat, exists, access", stored, many(look), ""),
    Row("first miss", nothing, miss, "LOOKUP"),
    Row("repeated misses", missed, many(miss), ""),
]


@pytest.fixture(
    scope="module",
    params=[{}, {"compiled_reader": False}, {"fast_lane": False}],
    ids=["compiled", "lane", "no-lane"],
)
def lanes(request: pytest.FixtureRequest) -> dict[str, bool]:
    """What a mount is set to."""
    return dict(request.param)


@pytest.fixture(scope="module")
def lane(lanes: dict[str, bool]) -> bool:
    """Whether the fast lane is on."""
    return lanes.get("fast_lane", True)


@pytest.fixture(scope="module")
def fast(lanes: dict[str, bool]) -> Iterator[Mounted]:
    """A passthrough mount with or without the fast lane."""
    with mounted_with(lanes) as mount:
        require_passthrough(mount)
        compiled = lanes.get("compiled_reader", True)
        assert mount.status()["request_reader"] == ("compiled" if compiled else "python")
        yield mount


@pytest.fixture(scope="module")
def slow(lanes: dict[str, bool]) -> Iterator[Mounted]:
    """The same on the daemon path."""
    with mounted_with({**lanes, "data_path": "daemon"}) as mount:
        yield mount


def has_ready(mount: Mounted, size_bytes: int) -> bool:
    """Whether a create finds an extent. One that does not waits, and so leaves the lane."""
    status = ask_status(mount)
    ready = status["preallocated_extents"], status["preallocated_bytes"]
    return ready[0] >= READY and ready[1] >= size_bytes


def cost(mount: Mounted, row: Row) -> Messages:
    """Do what *row* says in a new directory and return what it cost."""
    directory = mount.path / row.operation.replace(" ", "-")
    directory.mkdir()
    row.before(directory)
    until(lambda: has_ready(mount, 0 if row.before is nothing else MIB), "extents are ready")
    os.stat(mount.path)  # the kernel asks about the mkdir's own directory once more
    with counted(mount) as found:
        row.act(directory)
    return found


@pytest.mark.parametrize("row", TABLE, ids=operation_of)
def test_operations_cost_what_the_table_says(fast: Mounted, lane: bool, row: Row) -> None:
    found = cost(fast, row)
    assert found.asked == message_counter(row.messages)
    if lane:
        assert found.by_libfuse == message_counter(row.by_libfuse)


@pytest.mark.parametrize("row", DAEMON_TABLE, ids=operation_of)
def test_names_cost_the_same_on_the_daemon_path(slow: Mounted, lane: bool, row: Row) -> None:
    found = cost(slow, row)
    for counts in found:
        for name in BYTES:
            del counts[name]
    assert found.asked == message_counter(row.messages)
    if lane:
        assert found.by_libfuse == message_counter(row.by_libfuse)


def test_a_cold_name_is_looked_up_once(fast: Mounted) -> None:
    """After a restart of the server: each name on the way, then never again."""
    directory = fast.path / "cold"
    directory.mkdir()
    store(directory)
    fast.remount()
    os.stat(fast.path)
    with counted(fast) as first:
        look(directory)
    assert first.asked == message_counter("2 LOOKUP")
    with counted(fast) as second:
        many(look)(directory)
    assert second.asked == Counter()


def test_the_fast_lane_answers_only_when_it_is_on(fast: Mounted, lane: bool) -> None:
    """Off, the channel itself answers only what pyfuse3 cannot carry."""
    directory = fast.path / "either"
    directory.mkdir()
    store(directory)
    with counted(fast) as found:
        load_by_python(directory)
        load(directory)
    in_lane = {"GETATTR", "OPEN", "RELEASE"}
    assert set(found.in_channel) == ({"IOCTL"} | in_lane if lane else {"IOCTL"})
