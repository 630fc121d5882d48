"""What the machine is: what a wake-up costs, which moves nobody, and whether CPUs are short."""

import os
import threading
from pathlib import Path

import pytest

from kvfs.machine import hardware
from kvfs.machine.hardware import halt_poll_ns, round_trip_us, wants_cpu
from tests.support.clients.stepping import until


def test_a_trip_is_measured_and_moves_nobody() -> None:
    cpus = os.sched_getaffinity(0)
    trip_us = round_trip_us()
    assert os.sched_getaffinity(0) == cpus
    if len(cpus) > 1:
        assert trip_us is not None
        assert 0.5 < trip_us < 1e6, "two system calls at least"
    else:
        assert trip_us is None


def test_one_cpu_wakes_no_other() -> None:
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    try:
        assert round_trip_us() is None
    finally:
        os.sched_setaffinity(0, cpus)


def test_the_halt_polling_is_read_where_there_is_any() -> None:
    path = "/sys/module/haltpoll/parameters/guest_halt_poll_ns"
    found = halt_poll_ns()
    if os.path.exists(path):
        with open(path, encoding="ascii") as file:
            assert found == int(file.read())
    else:
        assert found is None


@pytest.mark.parametrize(
    ("told", "is_short"),
    [
        ("some avg10=75.00 avg60=1.00 avg300=0.00 total=1\nfull avg10=0.00\n", True),
        ("some avg10=74.99 avg60=99.00 avg300=99.00 total=1\nfull avg10=99.00\n", False),
        ("", False),
        ("some\n", False),
        (None, False),
    ],
)
def test_whether_cpus_are_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str | None, *, is_short: bool
) -> None:
    """A kernel without PSI tells nothing."""
    if told is not None:
        (tmp_path / "cpu").write_text(told)
    monkeypatch.setattr(hardware, "_CPU_PRESSURE", str(tmp_path / "cpu"))
    assert hardware.is_short_of_cpu() == is_short


def test_this_kernel_tells_whether_cpus_are_short() -> None:
    with open("/proc/pressure/cpu", encoding="ascii") as file:
        assert 0 <= hardware.parse_pressure(file.readline()) <= 1


def test_a_thread_that_runs_wants_a_cpu_and_one_that_waits_does_not() -> None:
    go = threading.Event()
    waits = threading.Thread(target=go.wait, name="a) R (b")
    waits.start()
    thread_id = waits.native_id
    assert thread_id is not None
    until(lambda: not wants_cpu(thread_id), "it waits")
    assert wants_cpu(threading.get_native_id())
    go.set()
    waits.join()
    until(lambda: not wants_cpu(thread_id), "it has ended, also for the kernel")


def test_a_device_that_lies_on_itself_is_looked_through_so_many_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel makes one; what is in /sys may still be anything, in a container."""
    (tmp_path / "7:0" / "slaves" / "loop0").mkdir(parents=True)
    (tmp_path / "7:0" / "slaves" / "loop0" / "dev").write_text("7:0\n")
    monkeypatch.setattr(hardware, "_SYS", tmp_path)
    assert hardware.drives_below(os.makedev(7, 0)) == []
    (tmp_path / "7:0" / "slaves" / "loop0" / "dev").write_text("259:0\n")
    (tmp_path / "259:0").mkdir()
    assert hardware.drives_below(os.makedev(7, 0)) == ["259:0"]


@pytest.mark.parametrize(
    ("machine", "group", "worst"),
    [("12.50", "3.00", 0.125), ("0.00", "40.00", 0.4), (None, "40.00", 0.4), (None, None, 0.0)],
)
def test_memory_waits_are_those_of_the_machine_or_of_the_group(
    machine: str | None,
    group: str | None,
    worst: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "group").mkdir()
    for said, path in ((machine, tmp_path / "machine"), (group, tmp_path / "group" / "pressure")):
        if said is not None:
            path.write_text(f"some avg10={said} avg60=0.00 avg300=0.00 total=7\nfull avg10=9.00\n")
    (tmp_path / "cgroup").write_text("3:cpu:/other\n0::/group\n")
    monkeypatch.setattr(hardware, "_MEMORY_PRESSURE", str(tmp_path / "machine"))
    monkeypatch.setattr(hardware, "_GROUP_OF_US", str(tmp_path / "cgroup"))
    monkeypatch.setattr(hardware, "_GROUP_PRESSURE", f"{tmp_path}{{group}}/pressure")
    hardware._unified_group.cache_clear()
    try:
        assert hardware.memory_pressure() == worst
    finally:
        hardware._unified_group.cache_clear()


def test_what_this_machine_says_of_memory_is_a_share() -> None:
    assert 0 <= hardware.memory_pressure() <= 1
