"""Ready extents: ahead of the demand, within their bounds, and nothing stays of what fails."""

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.core.errors import NoSpace, NotAtHand
from kvfs.core.headroom import FORGET_S, Headroom, SizeForecast
from kvfs.core.settings import Settings
from kvfs.core.types import FIRST_DRIVE, NO_INODE, ROOT_INODE, BackingId, InodeNo
from kvfs.pool.open.ready_extents import ReadyExtent, ReadyExtents
from kvfs.pool.space.device_probe import DeviceProbe
from kvfs.pool.space.drive import PoolDrive
from kvfs.pool.space.space import DeviceRoom, Space
from kvfs.pool.space.unlink_queue import UnlinkQueue
from kvfs.storage.background import Background
from kvfs.storage.extents import Extents
from kvfs.storage.inode_numbers import InodeNumbers
from kvfs.storage.syscalls import Syscalls
from tests.support.devices.failing_syscalls import FailingSyscalls
from tests.support.kernel.kernel_recorder import KernelRecorder
from tests.support.mounts.mounting import workplace
from tests.support.store.fake_loop import FakeLoop
from tests.support.store.stores import MIB

SIZE_BYTES = MIB


class Bench:
    """A ready queue on a directory in memory, with the calls it makes."""

    def __init__(self, path: Path, syscalls: Syscalls, settings: Settings) -> None:
        self.path = path
        self._pool_fd = os.open(path, os.O_RDONLY)
        if not (path / "INODES").exists():
            InodeNumbers.create(self._pool_fd, Syscalls())
        self._numbers = InodeNumbers((self._pool_fd,), syscalls)
        self._extents = Extents((self._pool_fd,), syscalls, "tmpfs")
        self.background = Background(1000)
        self.space = space = Space(100 * MIB, 0)
        self.kernel = KernelRecorder()
        self.forecast = SizeForecast(settings.demand_directories_max)
        self._drive = drive = PoolDrive(
            number=FIRST_DRIVE,
            ino=NO_INODE,
            probe=DeviceProbe(self._pool_fd, 5.0, time.monotonic, syscalls),
            space=space,
            headroom=Headroom(100 * MIB),
            device_room=DeviceRoom(space, lambda: 100 * MIB),
            unlink_queue=UnlinkQueue(self.background, NO_INODE, space),
        )
        self.queue = ReadyExtents(
            *(self._extents, self._numbers, self.background, drive),
            *(settings, self.kernel, self.forecast),
        )

    def extents(self) -> list[int]:
        """Return what the extent files on the device hold, in bytes."""
        return [file.stat().st_blocks * 512 for file in (self.path / "extents").glob("??/*")]

    def want(self, count: int, size_bytes: int = SIZE_BYTES) -> None:
        """Make the demand ask for about *count* extents, and have them prepared."""
        self.forecast.note_published(ROOT_INODE, size_bytes, 0.0)
        for _ in range(2 * count):
            self.forecast.note_created(size_bytes, 0.0)
        self.queue.run_due(0.0, 0)
        self.background.drain()

    def close(self) -> None:
        self.background.drain()  # what is ordered becomes ready first
        self.queue.give_way()
        self.background.stop()
        self._extents.close()
        self._numbers.close()
        self._drive.probe.close()
        os.close(self._pool_fd)


@pytest.fixture
def place() -> Iterator[Path]:
    with workplace() as path:
        yield path


@pytest.fixture
def bench(place: Path) -> Iterator[Bench]:
    made = Bench(place, Syscalls(), Settings())
    yield made
    made.close()


def give_up(extent: ReadyExtent) -> None:
    os.close(extent.fd)


def test_what_is_wanted_is_prepared_and_counted(bench: Bench) -> None:
    bench.want(3)
    assert bench.queue.count == 3
    assert bench.space.ready_bytes == 3 * SIZE_BYTES
    assert bench.extents() == [SIZE_BYTES] * 3


def test_a_taken_extent_is_empty_and_holds_its_blocks(bench: Bench) -> None:
    bench.want(2)
    extent = bench.queue.give_out(SIZE_BYTES, 0.0)
    status = os.fstat(extent.fd)
    assert (status.st_size, status.st_blocks * 512) == (0, SIZE_BYTES)
    assert extent.reserve_bytes == SIZE_BYTES
    assert (bench.queue.hits, bench.queue.misses) == (1, 0)
    give_up(extent)


def test_a_taken_extent_is_followed_by_the_next_one(bench: Bench) -> None:
    bench.want(2)
    give_up(bench.queue.give_out(SIZE_BYTES, 0.0))
    assert bench.space.ready_bytes == SIZE_BYTES, "what is only ordered holds no blocks"
    bench.background.drain()
    assert bench.queue.count == 2
    assert bench.space.ready_bytes == 2 * SIZE_BYTES


def test_without_a_ready_one_an_extent_is_made_at_once(bench: Bench) -> None:
    extent = bench.queue.give_out(8192, 0.0)
    assert extent.reserve_bytes == 8192
    assert (bench.queue.hits, bench.queue.misses) == (0, 1)
    assert bench.space.ready_bytes == 0
    give_up(extent)


def test_no_number_is_taken_twice(bench: Bench) -> None:
    bench.want(4)
    seen: set[InodeNo] = set()
    for _ in range(12):
        extent = bench.queue.give_out(SIZE_BYTES, 0.0)
        give_up(extent)
        assert extent.ino not in seen
        seen.add(extent.ino)
        bench.background.run_one()


def test_an_extent_that_comes_back_is_ready_again(bench: Bench) -> None:
    bench.want(1)
    extent = bench.queue.give_out(SIZE_BYTES, 0.0)
    before = bench.space.ready_bytes
    bench.queue.put_back(extent)
    assert bench.space.ready_bytes == before + SIZE_BYTES
    assert bench.queue.count == 1
    bench.queue.run_due(0.0, 0)
    bench.background.drain()


def test_they_take_no_more_than_their_share(bench: Bench) -> None:
    bench.want(1000)
    assert bench.space.ready_bytes <= 0.05 * bench.space.capacity_bytes
    assert bench.queue.count == 5


def test_they_are_no_more_than_the_settings_say(place: Path) -> None:
    bench = Bench(place, Syscalls(), Settings(ready_extents_max=3))
    bench.want(1000, 4096)
    assert bench.queue.count == 3
    bench.close()


def test_they_give_way_whole(bench: Bench) -> None:
    bench.want(4)
    bench.queue.give_way()
    assert (bench.queue.count, bench.space.ready_bytes) == (0, 0)
    bench.background.drain()
    assert bench.extents() == []


def test_they_go_when_nobody_wants_them_any_more(bench: Bench) -> None:
    bench.want(4)
    bench.queue.run_due(3600.0, 0)
    bench.background.drain()
    assert (bench.queue.count, bench.space.ready_bytes, bench.extents()) == (0, 0, [])


def test_a_full_pool_prepares_nothing(bench: Bench) -> None:
    bench.space.recorded_bytes = bench.space.capacity_bytes - SIZE_BYTES
    bench.want(3)
    assert (bench.queue.count, bench.space.ready_bytes, bench.extents()) == (0, 0, [])


def test_what_is_ordered_is_not_made_if_the_room_is_gone_by_then(bench: Bench) -> None:
    bench.forecast.note_published(ROOT_INODE, SIZE_BYTES, 0.0)
    bench.queue.run_due(0.0, 0)
    assert bench.background.backlog == 1
    bench.space.recorded_bytes = bench.space.capacity_bytes
    bench.background.drain()
    assert (bench.queue.count, bench.space.ready_bytes, bench.extents()) == (0, 0, [])


def test_no_more_is_ordered_than_there_is_room_for(bench: Bench) -> None:
    """Orders wait while requests keep the loop busy, and claim nothing meanwhile."""
    bench.space.recorded_bytes = bench.space.capacity_bytes - 5 * SIZE_BYTES // 2
    bench.forecast.note_published(ROOT_INODE, SIZE_BYTES, 0.0)
    for _ in range(20):
        bench.forecast.note_created(SIZE_BYTES, 0.0)
    for _ in range(3):
        bench.queue.run_due(0.0, bench.space.capacity_bytes)
    assert bench.background.backlog == 2
    assert bench.space.unclaimed_bytes == 5 * SIZE_BYTES // 2
    bench.background.drain()
    assert bench.extents() == [SIZE_BYTES] * 2


def test_a_size_that_nobody_stores_any_more_is_not_made(bench: Bench) -> None:
    """Else it would hold room until the next look, and go unused."""
    bench.forecast.note_published(ROOT_INODE, SIZE_BYTES, 0.0)
    bench.queue.run_due(0.0, 0)
    bench.forecast.note_published(ROOT_INODE, 2 * SIZE_BYTES, FORGET_S)
    bench.queue.run_due(FORGET_S + 1.0, 0)
    bench.background.drain()
    assert bench.extents() == [2 * SIZE_BYTES]


def test_a_device_without_room_for_a_reserve_still_gives_an_extent(place: Path) -> None:
    failing = FailingSyscalls(["fallocate"], 0, errno.ENOSPC, for_good=True)
    bench = Bench(place, failing, Settings())
    bench.want(2)
    failing.fail_at = 1
    bench.queue.give_way()
    bench.background.drain()
    with pytest.raises(NoSpace):
        bench.queue.give_out(SIZE_BYTES, 0.0)
    extent = bench.queue.give_out(0, 0.0)
    assert extent.reserve_bytes == 0
    give_up(extent)
    assert bench.extents() == [0]
    bench.close()


def test_a_device_without_room_for_a_file_says_so(place: Path) -> None:
    failing = FailingSyscalls(["open"], 0, errno.ENOSPC, for_good=True)
    bench = Bench(place, failing, Settings())
    give_up(bench.queue.give_out(SIZE_BYTES, 0.0))
    failing.fail_at = 1
    with pytest.raises(NoSpace):
        bench.queue.give_out(SIZE_BYTES, 0.0)
    bench.close()


@pytest.mark.usefixtures("caplog")
def test_what_the_data_path_refuses_leaves_nothing(bench: Bench) -> None:
    def refuse(_ino: InodeNo) -> BackingId:
        raise OSError(errno.EPERM, "no backing ids left")

    bench.kernel.adopt = refuse
    bench.want(2)
    assert (bench.queue.count, bench.space.ready_bytes) == (0, 0)
    with pytest.raises(OSError, match="no backing ids"):
        bench.queue.give_out(SIZE_BYTES, 0.0)
    assert bench.extents() == []


def test_what_goes_gives_its_backing_id_back(bench: Bench) -> None:
    bench.kernel.adopt = lambda ino: BackingId(ino)
    bench.want(2)
    bench.queue.give_way()
    bench.background.drain()
    assert len(set(bench.kernel.abandoned)) == 2


@pytest.mark.usefixtures("caplog")
def test_any_failing_call_leaves_the_accounts_right(place: Path) -> None:
    fail_at = 0
    failing = FailingSyscalls([], 0)
    while fail_at == 0 or failing.failed:
        fail_at += 1
        calls = ["open", "fallocate", "pwrite", "fsync", "unlink", "mkdir"]
        failing = FailingSyscalls(calls, 0, errno.EIO)
        bench = Bench(place, failing, Settings())
        failing.calls, failing.fail_at = 0, fail_at
        try:
            bench.want(3)
            for _ in range(4):
                give_up(bench.queue.give_out(SIZE_BYTES, 0.0))
        except OSError:
            assert failing.failed
        bench.background.drain()
        assert bench.space.ready_bytes == bench.queue.count * SIZE_BYTES
        bench.close()
        assert bench.space.ready_bytes == 0
    assert fail_at > 10


def test_who_lacks_them_has_more_made_but_not_ever_more(bench: Bench) -> None:
    """Twice as many each time; a burst of creates is not to fill the pool with empty files."""
    give_up(bench.queue.give_out(4096, 0.0))  # there are inode numbers from now on
    bench.background.begin_serving(FakeLoop())
    works = []
    for _ in range(10):
        with pytest.raises(NotAtHand) as lack:
            bench.queue.give_out(4096, 0.0)
        works.append(lack.value.begin())
    assert bench.queue._depths == {4096: 16}
    for work in works:
        work()()
    bench.background.end_serving()
    bench.queue.run_due(0.0, 0)
    bench.queue.run_due(0.0, 0)
