"""What a wake-up costs is measured between two CPUs, and leaves the caller where it was."""

import os

from kvfs.machine.hardware import halt_poll_ns, round_trip_us


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
