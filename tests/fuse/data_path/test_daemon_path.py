"""The daemon path under load: every read and write is answered, however many wait at once."""

import mmap
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from tests.fuse.conftest import TEST_WAIT_S
from tests.support.kernel.calls import opened, read_file, write_file
from tests.support.kernel.message_counts import ask_status, mounted_with
from tests.support.mounts.mounting import Mounted

pytestmark = pytest.mark.needs_fuse

MIB: Final = 1 << 20
DATA: Final = random.Random(1).randbytes(MIB)
COPIES: Final = 8
#: More than the server has tasks for requests that wait.
CROWD: Final = 300


@pytest.fixture(scope="module", params=[True, False], ids=["lane", "no-lane"])
def daemon(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A mount on the daemon path; without the lane every READ waits for a task and a thread."""
    with mounted_with({"data_path": "daemon", "fast_lane": request.param}) as mount:
        yield mount


@pytest.fixture
def kv(daemon: Mounted) -> Iterator[Path]:
    """Its root; a server that answers no more is aborted, so that the test fails and ends."""
    watchdog = threading.Timer(TEST_WAIT_S, daemon.abort)
    watchdog.start()
    yield daemon.path
    watchdog.cancel()


def read_direct(path: Path, times: int) -> None:
    """Read the whole file past the page cache: each READ asks for as much as it may, 1 MiB."""
    with opened(path, os.O_RDONLY | os.O_DIRECT) as fd, mmap.mmap(-1, COPIES * MIB) as memory:
        for _ in range(times):
            assert os.preadv(fd, [memory], 0) == COPIES * MIB
        assert memory[:] == DATA * COPIES


def test_large_answers_do_not_crowd_each_other_out(kv: Path) -> None:
    """Eight threads end at once, each with a megabyte: what found no room was lost, for ever."""
    write_file(kv / "file", DATA * COPIES)
    with ThreadPoolExecutor(8) as pool:
        for reading in [pool.submit(read_direct, kv / "file", 30) for _ in range(8)]:
            reading.result()


def test_more_readers_than_the_server_has_tasks(kv: Path, daemon: Mounted) -> None:
    """The rest waits for its turn."""
    write_file(kv / "file", DATA * COPIES)
    gate = threading.Barrier(CROWD)

    def read(number: int) -> bool:
        with opened(kv / "file", os.O_RDONLY | os.O_DIRECT) as fd, mmap.mmap(-1, MIB) as memory:
            gate.wait()
            return os.preadv(fd, [memory], number % COPIES * MIB) == MIB and memory[:] == DATA

    with ThreadPoolExecutor(CROWD) as pool:
        assert all(pool.map(read, range(CROWD)))
    os.statvfs(kv)  # every RELEASE was read before this is answered
    assert ask_status(daemon)["open_handles"] == 0


def test_readers_and_writers_at_once(kv: Path) -> None:
    """Writers of large blocks among readers; nothing waits for what it itself holds up."""
    write_file(kv / "file", DATA * COPIES)

    def write(number: int) -> None:
        for _ in range(4):
            write_file(kv / f"block{number}", DATA * COPIES)
        assert read_file(kv / f"block{number}") == DATA * COPIES

    with ThreadPoolExecutor(12) as pool:
        work = [pool.submit(read_direct, kv / "file", 10) for _ in range(6)]
        work += [pool.submit(write, number) for number in range(6)]
        for each in work:
            each.result()


@pytest.mark.skipif(
    bool(os.statvfs("/sys").f_flag & os.ST_RDONLY), reason="the setting is in sysfs: read-only here"
)
def test_the_kernel_reads_ahead_by_whole_requests(kv: Path, daemon: Mounted) -> None:
    """A block that is not in its cache: a MiB at a time, where by itself it asks for 128 KiB."""
    write_file(kv / "file", DATA * COPIES)
    with opened(kv / "file", os.O_RDONLY) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        before = ask_status(daemon)["requests"].get("READ", 0)
        assert os.pread(fd, COPIES * MIB, 0) == DATA * COPIES
    assert ask_status(daemon)["requests"]["READ"] - before <= 2 * COPIES


def test_what_reads_ask_for_is_counted(kv: Path, daemon: Mounted) -> None:
    """`kvfs doctor` tells by it that a client reads in small pieces."""
    write_file(kv / "file", DATA)
    before = ask_status(daemon)
    with opened(kv / "file", os.O_RDONLY | os.O_DIRECT) as fd, mmap.mmap(-1, 4096) as memory:
        for number in range(8):
            assert os.preadv(fd, [memory], 4096 * number) == 4096
    after = ask_status(daemon)
    assert after["server_read_bytes"] - before["server_read_bytes"] == 8 * 4096
    assert after["requests"]["READ"] - before["requests"].get("READ", 0) == 8
