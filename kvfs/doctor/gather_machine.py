"""What the kernel shows of a process and what it may use, and what an XFS says of itself.

proc(5), cgroups(7).
"""

import os
import struct
from pathlib import Path
from typing import Final

from kvfs.client.processes_on_mount import service_of
from kvfs.doctor.facts import Cpus, Limits, Xfs

_SECTOR: Final = 4096
#: struct xfs_dsb, big-endian: magic at 0, block size 4, blocks 8, log blocks 96, version 100,
#: inode size 104, and the v5 feature words of which ro_compat is at 212 (xfs_format.h).
_XFS_MAGIC: Final = b"XFSB"
_RO_COMPAT_RMAPBT: Final = 2
_RO_COMPAT_REFLINK: Final = 4
_VERSION_5: Final = 5
_CGROUPS: Final = Path("/sys/fs/cgroup")
_NODES: Final = Path("/sys/devices/system/node")
#: cgroup v1 shows "no limit" as the largest number of whole pages.
_NO_BOUND_BYTES: Final = 1 << 60


def xfs_on(path: str) -> Xfs | None:
    """Return the superblock of the XFS on the device or image *path*, None if it is not XFS.

    Reads the first sector, which a mounted XFS does not change.
    """
    try:
        with open(path, "rb") as file:
            sector = file.read(_SECTOR)
    except OSError:
        return None
    if len(sector) < _SECTOR or not sector.startswith(_XFS_MAGIC):
        return None
    block_bytes, blocks = struct.unpack_from(">IQ", sector, 4)
    (log_blocks,) = struct.unpack_from(">I", sector, 96)
    (version,) = struct.unpack_from(">H", sector, 100)
    (inode_bytes,) = struct.unpack_from(">H", sector, 104)
    (ro_compat,) = struct.unpack_from(">I", sector, 212)
    if version & 0xF != _VERSION_5:
        ro_compat = 0
    return Xfs(
        path,
        block_bytes * blocks,
        inode_bytes,
        log_blocks * block_bytes,
        bool(ro_compat & _RO_COMPAT_REFLINK),
        bool(ro_compat & _RO_COMPAT_RMAPBT),
    )


def limits_of(pid: int) -> Limits | None:
    """Return the limits of process *pid*, None if it cannot be looked at."""
    process = Path(f"/proc/{pid}")
    try:
        used = len(os.listdir(process / "fd"))
        soft = _soft_open_files((process / "limits").read_text())
        groups = _groups((process / "cgroup").read_text())
        oom_score_adj = int((process / "oom_score_adj").read_text())
    except (OSError, ValueError):
        return None
    memory_bytes, memory_group = _memory(groups)
    cpus, cpu_group = _cpus(groups)
    return Limits(
        used, soft, memory_bytes, cpus, service_of(pid), oom_score_adj, memory_group, cpu_group
    )


def cpus_of(pid: int) -> Cpus | None:
    """Return where process *pid* may run; None if it or the machine's nodes cannot be seen."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        allowed = next(
            line.split()[1] for line in status.splitlines() if line.startswith("Cpus_allowed_list:")
        )
        nodes = {
            int(node.name.removeprefix("node")): parse_ranges((node / "cpulist").read_text())
            for node in _NODES.glob("node[0-9]*")
        }
    except (OSError, StopIteration):
        return None
    return Cpus(parse_ranges(allowed), nodes) if nodes else None


def parse_ranges(text: str) -> frozenset[int]:
    """Return the numbers of a list such as ``0-3,8``."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def _soft_open_files(limits: str) -> int:
    line = next(line for line in limits.splitlines() if line.startswith("Max open files"))
    soft = line.split()[3]
    return 2**63 - 1 if soft == "unlimited" else int(soft)


def _groups(text: str) -> dict[str, Path]:
    """Return the directory of each controller's group; ``""`` is the unified hierarchy."""
    groups = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = Path(path)
    return groups


def _memory(groups: dict[str, Path]) -> tuple[int | None, str]:
    """Return the lowest limit of the group and those above it, and the file that sets it."""
    bounds = [(int(t), file) for t, file in _up(groups, "memory", "memory.max") if t != "max"]
    bounds += [(int(t), file) for t, file in _up(groups, "memory", "memory.limit_in_bytes")]
    least, file = min(bounds, default=(_NO_BOUND_BYTES, ""))
    return (least, file) if least < _NO_BOUND_BYTES else (None, "")


def _cpus(groups: dict[str, Path]) -> tuple[float | None, str]:
    shares: list[tuple[float, str]] = []
    for text, file in _up(groups, "cpu", "cpu.max"):
        quota, period = text.split()
        if quota != "max":
            shares.append((int(quota) / int(period), file))
    quotas, periods = (_up(groups, "cpu", f"cpu.cfs_{what}_us") for what in ("quota", "period"))
    shares += [
        (int(quota) / int(period), file)
        for (quota, file), (period, _) in zip(quotas, periods, strict=False)
        if int(quota) > 0
    ]
    return min(shares, default=(None, ""))


def _up(groups: dict[str, Path], controller: str, file: str) -> list[tuple[str, str]]:
    """Return the content and path of *file* in the group and all above it, in either version."""
    found = []
    for home, group in (
        (_CGROUPS, groups.get("")),
        (_CGROUPS / "unified", groups.get("")),
        (_CGROUPS / controller, groups.get(controller)),
    ):
        if group is None:
            continue
        for level in (group, *group.parents):
            path = home / str(level).lstrip("/") / file
            try:
                found.append((path.read_text().strip(), str(path)))
            except OSError:
                continue
    return found
