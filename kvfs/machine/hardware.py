"""What the machine offers: the memory it could give, and how fast one CPU wakes another."""

import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Final

#: How long Linux's haltpoll waits before it gives the CPU to the host, at most.
#: (Documentation/virt/guest-halt-polling.rst)
_HALT_POLL_PATH: Final = "/sys/module/haltpoll/parameters/guest_halt_poll_ns"
_TRIPS: Final = 400
#: Trips that are not counted, because the other program is still starting.
_UNCOUNTED: Final = 50


def round_trip_us() -> float | None:
    """Return the time to wake a process on another CPU and be woken by it, in us.

    A FUSE request wakes the server, and its answer wakes the client. On bare metal that takes some
    microseconds. If an idle CPU of a virtual machine has gone back to the host, or a CPU is in a
    deep sleep state, it takes a hundred and more, most of it as CPU time of the waking process.

    None with one CPU, or where cat(1) is missing. Takes a tenth of a second at worst.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        return None
    try:
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            try:
                os.sched_setaffinity(other.pid, cpus[1:2])
                os.sched_setaffinity(0, cpus[:1])
                return _quick_trip_us(other)
            finally:
                os.sched_setaffinity(0, cpus)
    except OSError:
        return None


def _quick_trip_us(other: "subprocess.Popen[bytes]") -> float:
    assert other.stdin is not None
    assert other.stdout is not None
    there, back = other.stdin.fileno(), other.stdout.fileno()
    took_ns = []
    for _ in range(_UNCOUNTED + _TRIPS):
        started_ns = time.monotonic_ns()
        os.write(there, b"?")
        os.read(back, 1)
        took_ns.append(time.monotonic_ns() - started_ns)
    # The lower quartile, because on a busy machine other programs have the CPU now and then.
    return statistics.quantiles(took_ns[_UNCOUNTED:], n=4)[0] / 1000


def halt_poll_ns() -> int | None:
    """Return how long a virtual CPU polls before it halts; None if that is not configurable."""
    try:
        return int(Path(_HALT_POLL_PATH).read_text())
    except (OSError, ValueError):
        return None


def available_memory_bytes() -> int | None:
    """Return MemAvailable: free memory and what the kernel could reclaim; None if unknown."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return None
