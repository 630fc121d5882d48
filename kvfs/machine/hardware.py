"""What the machine offers: memory, kernel settings, how fast one CPU wakes another, worn drives.

``/sys/dev/block`` shows which device lies on which: a partition on its drive, md and dm on others,
a loop device on a file. smartctl(8) reports the wear of NVMe and SATA drives. It may hang on a
failing one: call ``endurance_of`` in a thread of its own.
"""

import contextlib
import functools
import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

#: How long Linux's haltpoll waits before it gives the CPU to the host, at most.
#: (Documentation/virt/guest-halt-polling.rst)
_HALT_POLL_PATH: Final = "/sys/module/haltpoll/parameters/guest_halt_poll_ns"
_TRIPS: Final = 400
#: Trips that are not counted, because the other program is still starting.
_UNCOUNTED: Final = 50
_SYSCTL: Final = "/proc/sys"
_CPU_PRESSURE: Final = "/proc/pressure/cpu"
_MEMORY_PRESSURE: Final = "/proc/pressure/memory"
#: That of this process's group, which has limits of its own (cgroup-v2.rst, memory.pressure).
_GROUP_OF_US: Final = "/proc/self/cgroup"
_GROUP_PRESSURE: Final = "/sys/fs/cgroup{group}/memory.pressure"
#: Of the time; a machine with a few more tasks than cores has half of it.
_SHORT_SHARE: Final = 0.75
#: For how long a request to a FUSE server may take, in s (0: no limit); since Linux 6.15. Over it
#: the kernel aborts the whole connection (fuse_check_timeout in fs/fuse/dev.c). The first holds if
#: the server names none at INIT, the second for all (init_server_timeout in fs/fuse/inode.c).
DEFAULT_REQUEST_TIMEOUT: Final = "fs.fuse.default_request_timeout"
MAX_REQUEST_TIMEOUT: Final = "fs.fuse.max_request_timeout"


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


_SYS: Final = Path("/sys/dev/block")
#: Documentation/block/stat.rst: the seventh value is sectors written, of 512 bytes whatever the
#: device's own are.
_WRITTEN_FIELD: Final = 6
SECTOR_BYTES: Final = 512
#: NVM Express base specification, Data Units Written.
NVME_UNIT_BYTES: Final = 512_000
_SMARTCTL_WAIT_S: Final = 20.0
#: Layers of md, dm, loop and partitions.
_LAYERS_MAX: Final = 8
#: SATA attributes that count down from 100 to 0 as the flash wears (smartmontools' drivedb.h).
_ATA_WEAR: Final = frozenset(
    {"Media_Wearout_Indicator", "Wear_Leveling_Count", "SSD_Life_Left", "Percent_Lifetime_Remain"}
)


def is_short_of_cpu() -> bool:
    """Whether something runnable has waited for a CPU for most of the last ten seconds.

    False if it cannot be told (Documentation/accounting/psi.rst in the kernel's sources).
    """
    try:
        with open(_CPU_PRESSURE, encoding="ascii") as file:
            return parse_pressure(file.readline()) >= _SHORT_SHARE
    except (OSError, ValueError):
        return False


def wants_cpu(thread_id: int) -> bool:
    """Whether a thread of this process runs, or waits for a CPU; one that has ended does not.

    The state is the first field after the name, which may have brackets and blanks of its own
    (proc_pid_stat(5)). False if it cannot be told.
    """
    try:
        with open(f"/proc/self/task/{thread_id}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].startswith(b" R")
    except OSError:
        return False


def memory_pressure() -> float:
    """Return the share of the last ten seconds (0-1) in which something waited for memory.

    On the machine, or in this process's group, whichever is more; 0 if it cannot be told.
    """
    found = [0.0]
    for path in (_MEMORY_PRESSURE, _GROUP_PRESSURE.format(group=_unified_group())):
        with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
            found.append(parse_pressure(file.readline()))
    return max(found)


@functools.cache
def _unified_group() -> str:
    """Return the path of this process's group in the unified hierarchy; empty: it has none."""
    try:
        with open(_GROUP_OF_US, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return ""
    return next((line[3:].rstrip("/") for line in lines if line.startswith("0::")), "")


def parse_pressure(line: str) -> float:
    """Return the share of ten seconds (0-1) in "some avg10=12.34 ...". Raises ValueError."""
    _, _, rest = line.partition(" avg10=")
    return float(rest.split(" ", 1)[0]) / 100


def written_bytes(device: int) -> int | None:
    """Return the bytes written to block device *device* (st_dev) since boot; None: unknown."""
    try:
        return parse_written((_SYS / _numbers(device) / "stat").read_text())
    except OSError:
        return None


def parse_written(counters: str) -> int | None:
    """Return the bytes written in the text of ``/sys/block/DEV/stat``, None if not there."""
    try:
        return int(counters.split()[_WRITTEN_FIELD]) * SECTOR_BYTES
    except (IndexError, ValueError):
        return None


def has_block_device(device: int) -> bool:
    """Whether the kernel has a block device with the number *device* (st_dev)."""
    return (_SYS / _numbers(device)).exists()


class Endurance(NamedTuple):
    """What drives say of how much they may be written; None: they do not tell.

    ``left`` is the share that the most worn one has left: below 0 it was written more than its
    maker promised. ``life_bytes`` is what all of them may be written in their life, by their wear:
    one tells what it was written and which share of its life that was, from one percent on.
    """

    left: float | None = None
    life_bytes: float | None = None


def endurance_of(device: int) -> Endurance:
    """Return what the drives below *device* say. Takes some 0.1 s a drive; needs smartctl."""
    told = [_told_by(name) for name in drives_below(device)]
    left = [share for each in told if (share := left_of(each)) is not None]
    lives = [life for each in told if (life := life_of(each)) is not None]
    whole = sum(lives) if lives and len(lives) == len(told) else None
    return Endurance(min(left, default=None), whole)


def drives_below(device: int, depth: int = 0) -> list[str]:
    """Return the names of the drives (``nvme0n1``) on which block device *device* lies."""
    with contextlib.suppress(OSError, ValueError):
        at = (_SYS / _numbers(device)).resolve(strict=True)
        if (at / "partition").exists():
            at = at.parent
        below = [(each / "dev").read_text() for each in at.glob("slaves/*")]
        file = at / "loop" / "backing_file"
        if file.exists():
            below.append(_numbers(os.stat(file.read_text().strip()).st_dev))
        if not below:
            return [at.name]
        if depth < _LAYERS_MAX:
            numbers = (tuple(map(int, each.split(":"))) for each in below)
            found = (drives_below(os.makedev(*each), depth + 1) for each in numbers)
            return sorted({name for names in found for name in names})
    return []


def _numbers(device: int) -> str:
    return f"{os.major(device)}:{os.minor(device)}"


def _told_by(name: str) -> object:
    """Return what smartctl says of drive *name*; None: nothing."""
    command = ["smartctl", "--json", "--attributes", f"/dev/{name}"]
    try:
        # Its exit status is a set of flags, of which some are about the drive's health.
        printed = subprocess.run(
            command, capture_output=True, timeout=_SMARTCTL_WAIT_S, check=False, text=True
        )
        return json.loads(printed.stdout)
    except (OSError, ValueError, OverflowError, RecursionError, subprocess.TimeoutExpired):
        return None


def left_of(told: Any) -> float | None:  # noqa: ANN401
    """Return the share of endurance left in *told*, the JSON of smartctl; None if it is not there.

    The keys are those of smartmontools 7 (nvme_smart_health_information_log, ata_smart_attributes).
    """
    with contextlib.suppress(KeyError, TypeError):
        return 1 - float(told["nvme_smart_health_information_log"]["percentage_used"]) / 100
    with contextlib.suppress(KeyError, TypeError):
        worn = [
            float(row["value"]) / 100
            for row in told["ata_smart_attributes"]["table"]
            if row["name"] in _ATA_WEAR
        ]
        return min(worn, default=None)
    return None


def life_of(told: object) -> float | None:
    """Return the bytes that a drive is written in its life, by *told*; None: it cannot be told.

    NVMe counts in units of 512,000 bytes, and its wear in whole percent.
    """
    match told:
        case {
            "nvme_smart_health_information_log": {
                "percentage_used": int() | float() as used_percent,
                "data_units_written": int() | float() as units,
            }
        } if used_percent > 0:
            return units * NVME_UNIT_BYTES * 100 / used_percent
    return None


def sysctl(name: str) -> int | None:
    """Return the number in setting *name*, such as vm.dirty_ratio; None: this kernel has none."""
    try:
        with open(f"{_SYSCTL}/{name.replace('.', '/')}", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None
