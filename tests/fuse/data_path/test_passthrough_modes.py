"""Many openers of one file in every mix of flags: never EIO, always the right bytes.

The kernel refuses (EIO) a handle that is on another data path than the inode's others, or that
has another backing id; so a refusal anywhere here is a broken rule.
"""

import contextlib
import mmap
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from errno import ENOENT
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from tests.support.clients.callers import Caller, callers
from tests.support.kernel.calls import opened, read_file, tolerated, write_file
from tests.support.mounts.mounting import Mounted, Reference

pytestmark = pytest.mark.needs_fuse

PAGE: Final = 4096
#: Each opener has a region of its own in the shared file.
REGION: Final = 16 * PAGE
READ, WRITE, BOTH = os.O_RDONLY, os.O_WRONLY, os.O_RDWR
FLAGS: Final = {
    "read": READ,
    "write": WRITE,
    "both": BOTH,
    "append": WRITE | os.O_APPEND,
    "both-append": BOTH | os.O_APPEND,
    "read-direct": READ | os.O_DIRECT,
    "write-direct": WRITE | os.O_DIRECT,
    "both-direct": BOTH | os.O_DIRECT,
    "sync": BOTH | os.O_SYNC,
    "create": BOTH | os.O_CREAT,
    "nonblock": READ | os.O_NONBLOCK,
    "noatime": READ | os.O_NOATIME,
}


def pattern(seed: object, size_bytes: int = REGION) -> bytes:
    """Return bytes that the seed tells apart."""
    return random.Random(repr(seed)).randbytes(size_bytes)


@contextlib.contextmanager
def aligned(size_bytes: int, data: bytes = b"") -> Iterator[mmap.mmap]:
    """Yield memory that O_DIRECT takes, filled with *data*."""
    with contextlib.closing(mmap.mmap(-1, size_bytes)) as memory:
        memory[: len(data)] = data
        yield memory


def reads(fd: int, at_bytes: int, size_bytes: int) -> bytes:
    """Read by any descriptor that may."""
    with aligned(size_bytes) as memory:
        done = os.preadv(fd, [memory], at_bytes)
        return memory[:done]


def writes(fd: int, at_bytes: int, data: bytes) -> None:
    """Write by any descriptor that may; O_APPEND ignores the place."""
    with aligned(len(data), data) as memory:
        assert os.pwritev(fd, [memory], at_bytes) == len(data)


def may_read(flags: int) -> bool:
    """Whether a descriptor with these flags reads."""
    return flags & os.O_ACCMODE != os.O_WRONLY


def may_write(flags: int) -> bool:
    """Whether a descriptor with these flags writes."""
    return flags & os.O_ACCMODE != os.O_RDONLY


@pytest.mark.parametrize("second", FLAGS)
@pytest.mark.parametrize("first", FLAGS)
def test_every_pair_of_flags(kv: Path, first: str, second: str) -> None:
    """Two descriptors at a time, of one process, each doing all it may."""
    content = bytearray(pattern("before", 2 * REGION))
    path = kv / "file"
    write_file(path, bytes(content))
    with opened(path, FLAGS[first]) as one, opened(path, FLAGS[second]) as two:
        for step, (fd, flags) in enumerate(((one, FLAGS[first]), (two, FLAGS[second]))):
            if may_write(flags):
                data = pattern(step, PAGE)
                at = len(content) if flags & os.O_APPEND else step * REGION + PAGE
                writes(fd, at, data)
                content[at : at + PAGE] = data
            for reader, its in ((one, FLAGS[first]), (two, FLAGS[second])):
                assert os.fstat(reader).st_size == len(content)
                if may_read(its):
                    assert reads(reader, 0, len(content)) == content
    assert read_file(path) == content


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("kind", [mmap.MAP_SHARED, mmap.MAP_PRIVATE], ids=["shared", "private"])
def test_mappings_beside_every_descriptor(kv: Path, flags: int, kind: int) -> None:
    """A mapping made by another process's descriptor mode, while this one reads and writes."""
    content = bytearray(pattern("before", 2 * REGION))
    path = kv / "file"
    write_file(path, bytes(content))
    with (
        opened(path, os.O_RDWR) as mapped,
        contextlib.closing(mmap.mmap(mapped, 2 * REGION, flags=kind)) as memory,
        opened(path, flags) as fd,
    ):
        os.fstat(mapped)
        if may_write(flags) and not flags & os.O_APPEND:
            writes(fd, PAGE, data := pattern("fd", PAGE))
            content[PAGE : 2 * PAGE] = data
        assert memory[: 2 * REGION] == content
        if kind == mmap.MAP_SHARED:
            memory[3 * PAGE : 4 * PAGE] = data = pattern("memory", PAGE)
            content[3 * PAGE : 4 * PAGE] = data
            memory.flush()
        if may_read(flags):
            assert reads(fd, 0, 2 * REGION) == content
    assert read_file(path) == content


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_truncation_under_every_descriptor(kv: Path, flags: int) -> None:
    """O_TRUNC by another process while a descriptor is open: both go on with the new content."""
    path = kv / "file"
    write_file(path, pattern("before"))
    with opened(path, flags) as fd, Caller() as elsewhere:
        remote = elsewhere.os("open", str(path), os.O_RDWR | os.O_TRUNC)
        assert elsewhere.os("stat", str(path)).st_size == 0
        data = pattern("after", 3 * PAGE)
        elsewhere.os("write", remote, data)
        if may_read(flags):
            # By a path of its own (docs/semantics.md, rewrite) it may keep the old bytes.
            assert reads(fd, 0, REGION) in (data, pattern("before"))
        elsewhere.os("close", remote)
    assert read_file(path) == data


class Crowd:
    """Openers of one file, each with a region: whoever reads a region finds one of its versions."""

    def __init__(self, path: Path, regions: int) -> None:
        self.path = path
        self.regions = regions
        self.current = [pattern((number, 0)) for number in range(regions)]
        write_file(path, b"".join(self.current))

    def turn(self, number: int, version: int, chance: random.Random) -> None:
        """Let opener *number* rewrite its region one way and read it another way."""
        self.current[number] = data = pattern((number, version))
        at = number * REGION
        how = chance.choice(["write", "direct", "mmap", "both"])
        if how == "mmap":
            with (
                opened(self.path, os.O_RDWR) as fd,
                contextlib.closing(mmap.mmap(fd, REGION, offset=at)) as memory,
            ):
                memory[:] = data
                memory.flush()
        else:
            flags = {"write": WRITE, "direct": WRITE | os.O_DIRECT, "both": BOTH}[how]
            with opened(self.path, flags) as fd:
                writes(fd, at, data)
        with opened(self.path, chance.choice([READ, BOTH, READ | os.O_DIRECT])) as fd:
            assert reads(fd, at, REGION) == data

    def remote_turn(self, caller: Caller, number: int, version: int, chance: random.Random) -> None:
        """The same from another process."""
        self.current[number] = data = pattern((number, version))
        at = number * REGION
        writer = caller.os("open", str(self.path), chance.choice([WRITE, BOTH, WRITE | os.O_SYNC]))
        assert caller.os("pwrite", writer, data, at) == REGION
        reader = caller.os("open", str(self.path), chance.choice([READ, BOTH]))
        assert caller.os("pread", reader, REGION, at) == data
        for fd in chance.sample([writer, reader], 2):
            caller.os("close", fd)


def together(work: Sequence[Callable[[], None]]) -> None:
    """Run all at once; the first failure is raised."""
    gate = threading.Barrier(len(work))

    def run(deed: Callable[[], None]) -> None:
        gate.wait()
        deed()

    with ThreadPoolExecutor(len(work)) as pool:
        for result in [pool.submit(run, deed) for deed in work]:
            result.result()


def test_a_crowd_of_threads_and_processes(kv: Path, mounted: Mounted | Reference) -> None:
    """Four threads and three processes open, write, map, read and close one file at once."""
    with callers(3) as processes:
        crowd = Crowd(kv / "file", 7)

        def local(number: int) -> None:
            chance = random.Random(number)
            for version in range(1, 31):
                crowd.turn(number, version, chance)

        def remote(number: int) -> None:
            chance = random.Random(number)
            for version in range(1, 31):
                crowd.remote_turn(processes[number - 4], number, version, chance)

        together(
            [partial(local, number) for number in range(4)]
            + [partial(remote, number) for number in range(4, 7)]
        )
        assert read_file(kv / "file") == b"".join(crowd.current)
    mounted.remount()
    assert read_file(kv / "file") == b"".join(crowd.current)


def test_a_crowd_while_the_name_moves(kv: Path) -> None:
    """Readers of every kind while a writer replaces, moves and removes the name."""
    versions = [pattern(number) for number in range(40)]
    known = set(versions)
    ended = threading.Event()
    write_file(kv / "file", versions[0])

    def replace() -> None:
        try:
            for number, version in enumerate(versions):
                write_file(kv / "tmp", version)
                os.rename(kv / "tmp", kv / "file")
                if number % 5 == 4:
                    os.rename(kv / "file", kv / "elsewhere")
                    os.rename(kv / "elsewhere", kv / "file")
                if number % 7 == 6:
                    os.unlink(kv / "file")
        finally:
            ended.set()

    def read(flags: int) -> None:
        while not ended.is_set():
            with tolerated(ENOENT), opened(kv / "file", flags) as fd:
                first = reads(fd, 0, REGION)
                assert first in known
                with contextlib.closing(mmap.mmap(fd, 0, prot=mmap.PROT_READ)) as memory:
                    assert memory[:] == first
                assert reads(fd, 0, REGION) == first

    flags = [READ, READ | os.O_DIRECT, BOTH, READ | os.O_NOATIME]
    together([replace, *(partial(read, each) for each in flags)])
    assert read_file(kv / "file") == versions[-1]


def test_appenders_in_a_crowd(kv: Path) -> None:
    """Records of several threads and processes, O_APPEND in every mode: none lost, none torn."""
    record, each = 4096, 40
    modes = [WRITE, BOTH, WRITE | os.O_SYNC, BOTH]
    write_file(kv / "log", b"")

    def local(number: int, flags: int) -> None:
        for _ in range(each):
            with opened(kv / "log", flags | os.O_APPEND) as fd:
                assert os.write(fd, bytes([number]) * record) == record

    def remote(number: int, caller: Caller) -> None:
        fd = caller.os("open", str(kv / "log"), os.O_WRONLY | os.O_APPEND)
        for _ in range(each):
            assert caller.os("write", fd, bytes([number]) * record) == record
        caller.os("close", fd)

    with callers(2) as processes:
        together(
            [partial(local, number, flags) for number, flags in enumerate(modes)]
            + [partial(remote, len(modes) + n, caller) for n, caller in enumerate(processes)]
        )
    content = read_file(kv / "log")
    records = [content[at : at + record] for at in range(0, len(content), record)]
    assert sorted(records) == sorted([bytes([number]) * record for number in range(6)] * each)
