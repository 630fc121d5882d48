"""What the probe says of a device that answers, answers late, does not answer, or fails."""

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.core.pool_layout import INODES
from kvfs.machine.hardware import has_block_device
from kvfs.pool.space.device_probe import DeviceProbe, block_device_of, worst_answer
from kvfs.storage.syscalls import Syscalls
from tests.support.clients.stepping import until

SILENT_S: Final = 5.0


class HeldSyscalls(Syscalls):
    """Reads wait until ``answers`` is set, and then fail if there is an ``error_no``."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.error_no = 0
        self.reads = self.syncs = 0
        self.asked_bytes: set[int] = set()
        self.write_error_no = self.writes = 0
        calls = {"preadv": self._preadv, "fdatasync": self._fdatasync, "pwrite": self._pwrite}
        for name, call in calls.items():
            setattr(self, name, call)

    def _preadv(self, fd: int, buffers: list[bytearray], offset: int) -> int:
        self.answers.wait()
        self.reads += 1
        self.asked_bytes.add(sum(map(len, buffers)))
        if self.error_no:
            raise OSError(self.error_no, os.strerror(self.error_no))
        return os.preadv(fd, buffers, offset)

    def _fdatasync(self, fd: int) -> None:
        self.syncs += 1
        os.fdatasync(fd)

    def _pwrite(self, fd: int, data: bytes, offset: int) -> int:
        self.writes += 1
        if self.write_error_no:
            raise OSError(self.write_error_no, os.strerror(self.write_error_no))
        return os.pwrite(fd, data, offset)


class Probed:
    """A probe of a directory, with a clock and a device of the test's."""

    def __init__(self, directory: Path, *, writes: bool = True) -> None:
        self.is_there = True
        (directory / INODES).write_bytes(b"range")
        self.calls = HeldSyscalls()
        self.now_s = 100.0
        self.is_short = self.wants_cpu = False
        self._pool_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        self.probe = DeviceProbe(
            self._pool_fd,
            SILENT_S,
            lambda: self.now_s,
            self.calls,
            lambda: self.is_short,
            wants_cpu=lambda _: self.wants_cpu,
            writes=writes,
            is_there=lambda: self.is_there,
        )

    def close(self) -> None:
        """Let it answer, and end."""
        self.calls.answers.set()
        self.probe.close()
        os.close(self._pool_fd)

    def tick(self, later_s: float = 0.0) -> str:
        """Let time pass, with a tick each second and at the end; return the state."""
        end_s = self.now_s + later_s
        while self.now_s < end_s - 1:
            self.now_s += 1
            self.probe.run_due(self.now_s)
        self.now_s = end_s
        self.probe.run_due(self.now_s)
        return self.probe.state.value

    def stop(self, wait_s: float) -> str:
        """Let time pass without any tick; return the state after the next one."""
        self.now_s += wait_s
        self.probe.run_due(self.now_s)
        return self.probe.state.value

    def ask(self) -> str:
        """Let one more probe begin and come back; return the state."""
        self.stop(2.5)
        return self.take_answer()

    def take_answer(self) -> str:
        """Wait until the probe under way has come back; return the state."""
        reads = self.calls.reads

        def came_back() -> bool:
            self.tick()
            return not self.probe.is_waiting

        until(came_back, f"the probe after {reads} comes back")
        return self.probe.state.value


@pytest.fixture
def probed(tmp_path: Path) -> Iterator[Probed]:
    made = Probed(tmp_path)
    yield made
    made.close()


def test_it_asks_every_two_seconds_and_syncs_every_fifth_time(probed: Probed) -> None:
    for _ in range(10):
        assert probed.ask() == "serving"
    assert (probed.calls.reads, probed.calls.syncs) == (10, 2)
    assert probed.tick(1.0) == "serving"
    assert not probed.probe.is_waiting


def test_a_device_is_slow_and_then_silent_and_says_so(
    probed: Probed, caplog: pytest.LogCaptureFixture
) -> None:
    probed.calls.answers.clear()
    assert probed.tick() == "serving"
    assert probed.tick(1.0) == "slow"
    assert worst_answer([probed.probe]) == {"device_state": "slow", "device_silent_s": 0.0}
    assert probed.tick(4.0) == "silent"
    assert probed.tick(60.0) == "silent"
    assert worst_answer([probed.probe]) == {"device_state": "silent", "device_silent_s": 65.0}
    probed.calls.answers.set()
    assert probed.take_answer() == "slow", "until the next one has answered in time"
    assert probed.ask() == "serving"
    said = [record.getMessage() for record in caplog.records]
    assert [line[:23] for line in said] == ["the device has not answ", "the device answers agai"]
    assert probed.calls.reads == 2, "no second probe while one waits"


def test_a_server_that_was_stopped_itself_says_nothing_of_the_device(probed: Probed) -> None:
    """The thread that asks was stopped, too."""
    probed.calls.answers.clear()
    probed.tick()
    assert probed.stop(60.0) == "slow"
    probed.calls.answers.set()
    assert probed.take_answer() == "slow"
    assert probed.ask() == "serving"


def test_it_asks_for_no_less_than_the_sector_of_any_drive(probed: Probed) -> None:
    """O_DIRECT of less is EINVAL on drives with sectors of 4 KiB, which are not asked then."""
    probed.ask()
    assert probed.calls.asked_bytes == {4096}


def test_an_error_is_an_answer(probed: Probed) -> None:
    """Whether the device is lost is told by other checks (device_watch.py)."""
    probed.calls.error_no = errno.EIO
    assert probed.ask() == "serving"
    assert probed.calls.reads == 1


# ---- while requests wait ----


def test_in_a_hurry_it_asks_at_the_next_tick(probed: Probed) -> None:
    probed.ask()
    probed.tick(0.5)
    assert not probed.probe.is_waiting, "it would pause"
    probed.probe.hurry()
    assert not probed.probe.is_waiting, "not before the tick"
    probed.tick()
    probed.take_answer()
    assert probed.calls.reads == 2
    probed.tick(0.5)
    assert not probed.probe.is_waiting, "once"


def test_in_a_hurry_it_does_not_ask_twice_at_once(probed: Probed) -> None:
    probed.calls.answers.clear()
    probed.tick()
    probed.probe.hurry()
    probed.tick(1.0)
    probed.calls.answers.set()
    probed.take_answer()
    assert probed.calls.reads == 1
    probed.tick(1.0)
    assert not probed.probe.is_waiting, "the pause after an answer"


def test_a_device_that_is_not_asked_is_not_suspect(probed: Probed) -> None:
    assert not probed.probe.is_suspect
    probed.ask()
    probed.now_s += 60.0
    assert not probed.probe.is_suspect


def test_a_device_is_suspect_long_before_it_is_silent(probed: Probed) -> None:
    probed.calls.answers.clear()
    probed.tick()
    probed.tick(0.625)
    assert not probed.probe.is_suspect
    assert probed.tick(0.125) == "serving"
    assert probed.probe.is_suspect
    probed.calls.answers.set()
    probed.take_answer()
    assert not probed.probe.is_suspect


def test_it_becomes_suspect_without_a_tick(probed: Probed) -> None:
    """Who waits looks more often than the ticks come."""
    probed.calls.answers.clear()
    probed.tick()
    probed.now_s += 0.75
    assert probed.probe.is_suspect


def test_a_server_that_was_stopped_itself_suspects_the_device_for_a_second_at_most(
    probed: Probed,
) -> None:
    """A device that is usually as late as that is not suspect then."""
    take_s(probed, 0.25)
    probed.calls.answers.clear()
    probed.stop(2.5)
    probed.stop(60.0)
    assert not probed.probe.is_suspect


def test_where_cpus_are_short_it_is_suspect_later(probed: Probed) -> None:
    """[device-aside] The kernel's own threads below it may wait for one."""
    probed.is_short = True
    probed.calls.answers.clear()
    probed.tick()
    probed.tick(2.25)
    assert not probed.probe.is_suspect
    probed.is_short = False
    assert probed.probe.is_suspect
    probed.is_short = True
    probed.tick(0.25)
    assert probed.probe.is_suspect


@pytest.mark.usefixtures("caplog")
def test_a_probe_that_waits_for_a_cpu_says_nothing_of_the_device(probed: Probed) -> None:
    """[device-aside] However long that takes; what it waits for the device counts."""
    probed.calls.answers.clear()
    probed.tick()
    probed.wants_cpu = True
    assert probed.tick(60.0) == "serving"
    assert not probed.probe.is_suspect
    probed.wants_cpu = False
    assert probed.tick(0.5) == "serving"
    assert not probed.probe.is_suspect
    assert probed.tick(4.5) == "silent"
    assert probed.probe.silent_s == SILENT_S


def take_s(probed: Probed, took_s: float) -> None:
    """Let the next probe take so long."""
    probed.calls.answers.clear()
    probed.stop(2.5)
    probed.tick(took_s)
    probed.calls.answers.set()
    probed.take_answer()


@pytest.mark.usefixtures("caplog")
@pytest.mark.parametrize(
    ("usual_s", "suspect_s"),
    [
        (0.0625, 0.75),  # at least so long, but for the quarters of a second of this test
        (0.25, 2.0),
        (0.5, 4.0),
        (2.0, SILENT_S),  # a silent device is suspect, however long it took before
    ],
)
def test_a_device_that_usually_answers_late_is_suspect_later(
    probed: Probed, usual_s: float, suspect_s: float
) -> None:
    take_s(probed, usual_s)
    probed.calls.answers.clear()
    probed.stop(2.5)
    probed.tick(suspect_s - 0.25)
    assert not probed.probe.is_suspect
    probed.tick(0.25)
    assert probed.probe.is_suspect


def test_only_the_last_answer_says_what_is_usual(probed: Probed) -> None:
    take_s(probed, 0.5)
    probed.ask()
    probed.calls.answers.clear()
    probed.stop(2.5)
    probed.tick(0.75)
    assert probed.probe.is_suspect


@pytest.mark.parametrize("read_no", [errno.EIO, errno.ENODEV, errno.ENXIO])
@pytest.mark.parametrize("write_no", [errno.EIO, errno.ENODEV, errno.ENXIO])
def test_a_drive_that_neither_reads_nor_writes_is_gone(
    probed: Probed, read_no: int, write_no: int
) -> None:
    """Not at the first error, nor while it is asked to read alone."""
    probed.calls.error_no, probed.calls.write_error_no = read_no, write_no
    for _ in range(5):
        probed.ask()
        assert probed.probe.why_gone == ""
    assert probed.calls.writes == 2
    probed.ask()
    said = f"its reads fail: {os.strerror(read_no)} and its writes fail: {os.strerror(write_no)}"
    assert probed.probe.why_gone == said


@pytest.mark.parametrize("write_no", [0, errno.ENOSPC, errno.EDQUOT])
def test_a_drive_whose_reads_alone_fail_is_not_gone(probed: Probed, write_no: int) -> None:
    probed.calls.error_no, probed.calls.write_error_no = errno.EIO, write_no
    for _ in range(20):
        probed.ask()
    assert probed.calls.writes == 5
    assert probed.probe.why_gone == ""


def test_a_drive_that_fails_for_a_moment_is_not_gone(probed: Probed) -> None:
    for _ in range(3):
        probed.calls.error_no = probed.calls.write_error_no = errno.EIO
        for _ in range(5):
            probed.ask()
        probed.calls.error_no = probed.calls.write_error_no = 0
        probed.ask()
    assert probed.probe.why_gone == ""


def test_a_drive_that_may_not_be_written_to_is_not_asked_to_write(tmp_path: Path) -> None:
    probed = Probed(tmp_path, writes=False)
    probed.calls.error_no = probed.calls.write_error_no = errno.EIO
    for _ in range(20):
        probed.ask()
    assert (probed.calls.writes, probed.probe.why_gone) == (0, "")
    probed.close()


def test_a_drive_that_failed_to_write_is_asked_until_it_does_or_is_gone(probed: Probed) -> None:
    probed.ask()
    assert probed.calls.writes == 0
    probed.probe.doubt()
    probed.take_answer()
    probed.ask()
    assert probed.calls.writes == 1, "it did"
    probed.calls.write_error_no = errno.EIO
    probed.probe.doubt()
    probed.take_answer()
    for _ in range(5):
        assert probed.probe.why_gone == ""
        probed.ask()
    assert probed.probe.why_gone == "its writes fail: Input/output error"


def test_a_device_that_the_kernel_has_no_more_is_gone_at_once(probed: Probed) -> None:
    probed.ask()
    probed.is_there = False
    probed.ask()
    assert "the kernel has no such device" in probed.probe.why_gone


def test_a_file_system_without_a_device_is_always_there(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        fd = os.open(tmp_path, os.O_RDONLY)
        stack.callback(os.close, fd)
        assert block_device_of(fd)()
    assert not has_block_device(os.makedev(4095, 1 << 19))
