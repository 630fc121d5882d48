"""Rules about the machine: CPUs, memory, drives, and the file system under the pool."""

import shlex
from typing import Final

from kvfs.core.pool_layout import XFS_INODE_BYTES, XFS_INODES, XFS_TREES
from kvfs.core.sizes import KIB, format_size
from kvfs.doctor.facts import Facts
from kvfs.doctor.finding import Finding, Severity

#: Blocks of 2-40 MiB are read from start to end. Read-ahead limits what one buffered read keeps in
#: flight (page_cache_sync_ra in mm/readahead.c), and NVMe wants a few MiB in flight.
_READ_AHEAD_LOW_BYTES: Final = 1 << 20
#: Keeps several requests in flight; kvfs sets it for its own mounts (mount/files/data_path.py).
READ_AHEAD_WANTED_BYTES: Final = 4 << 20
#: Some seconds of writing for one NVMe drive; more means a longer stall when it must be written.
_DIRTY_HIGH_BYTES: Final = 16 << 30
_DIRTY_WANTED_BYTES: Final = 8 << 30
_DIRTY_BACKGROUND_WANTED_BYTES: Final = 1 << 30
#: Less than a few blocks: the kernel makes every writer wait for the drive.
_DIRTY_LOW_BYTES: Final = 256 << 20
#: A request and its answer each wake a process. If both together take longer, it is a finding.
SLOW_TRIP_US: Final = 40.0
#: The default of Linux's haltpoll (Documentation/virt/guest-halt-polling.rst).
_HALT_POLL_WANTED_NS: Final = 200_000
#: BFQ orders requests by process, which costs CPU and does not help a drive of 1 M IOPS.
_SLOW_SCHEDULERS: Final = frozenset({"bfq"})
#: Creates and unlinks come in bursts. When the log is full, they wait for the disk.
_LOG_LOW_BYTES: Final = 64 << 20
_LOG_MATTERS_FROM_BYTES: Final = 100 << 30
#: By option: what it costs, and the option to use instead.
_COSTLY: Final = {
    "sync": ("every write waits for the drive", "async"),
    "dirsync": ("every create and unlink waits for the drive", "async"),
    "wsync": ("every create and unlink waits for the drive", "defaults"),
    "data=journal": ("every byte is written twice", "data=ordered"),
    "discard": ("every unlink waits for the drive's own discard", "nodiscard"),
}
_SEVERE: Final = frozenset({"sync", "dirsync", "wsync", "data=journal"})
#: These are accepted by a mount only: a remount refuses them.
_NEEDS_NEW_MOUNT: Final = frozenset({"wsync", "data=journal"})


def numa(facts: Facts) -> list[Finding] | None:
    """A server far from its drive pays for the distance at every interrupt and every copy."""
    if facts.cpus is None or facts.disks is None:
        return None
    found = []
    for node in sorted({disk.numa_node for disk in facts.disks if disk.numa_node >= 0}):
        near = facts.cpus.by_node.get(node, frozenset())
        if not near or len(facts.cpus.by_node) < 2:
            continue
        names = ", ".join(disk.name for disk in facts.disks if disk.numa_node == node)
        ranges = _as_ranges(near)
        fix = f"taskset --all-tasks --cpu-list --pid {ranges} {facts.server_pid}"
        if facts.limits is not None and facts.limits.unit:
            fix += f"\nfor good: CPUAffinity={ranges} by `systemctl edit {facts.limits.unit}`"
        if not near & facts.cpus.allowed:
            problem = f"{names} is on NUMA node {node}, and the server may not run there"
            found.append(Finding(Severity.WARNING, problem, fix))
        elif facts.cpus.allowed - near:
            problem = f"{names} is on NUMA node {node}, and the server may run at others as well"
            found.append(Finding(Severity.NOTE, problem, fix))
    return found


def _as_ranges(cpus: frozenset[int]) -> str:
    """Return *cpus* as taskset reads them: ``0-15,32``."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def wake_ups(facts: Facts) -> list[Finding] | None:
    """Each request wakes the server, and each answer its client."""
    if facts.wake is None:
        return None
    trip_us, halt_poll_ns = facts.wake
    if trip_us <= SLOW_TRIP_US:
        return []
    if halt_poll_ns is None:
        fix = (
            "for state in /sys/devices/system/cpu/cpu*/cpuidle/state*; do "
            '[ ! -e "$state" ] || [ "$(cat "$state/latency")" -le 20 ] || echo 1 > '
            '"$state/disable"; done\n'
            "in a virtual machine: modprobe cpuidle_haltpoll, or ask its host for halt polling"
        )
    else:
        wanted_ns = max(_HALT_POLL_WANTED_NS, 2 * halt_poll_ns)
        fix = f"echo {wanted_ns} > /sys/module/haltpoll/parameters/guest_halt_poll_ns"
    problem = (
        f"a wake-up round trip between two CPUs takes {trip_us:.0f} us (5 to 15 is usual): idle "
        "CPUs sleep too deeply, and every open and store pays for it several times"
    )
    return [Finding(Severity.WARNING, problem, fix)]


def io_scheduler(facts: Facts) -> list[Finding] | None:
    """Flash does not need its requests sorted."""
    if facts.disks is None:
        return None
    return [
        Finding(
            Severity.WARNING,
            f"{disk.name} uses the I/O scheduler {disk.scheduler}, which costs CPU per request and "
            "delays writers",
            f"echo none > /sys/block/{disk.name}/queue/scheduler",
        )
        for disk in facts.disks
        if disk.scheduler in _SLOW_SCHEDULERS and not disk.is_rotational
    ]


def rotating_drive(facts: Facts) -> list[Finding] | None:
    """A hard disk loads a block more slowly than a GPU computes it again."""
    if facts.disks is None:
        return None
    return [
        Finding(
            Severity.WARNING,
            f"{disk.name} reports a rotating disk: a load is slower than a recompute",
            "lsblk --output NAME,SIZE,ROTA,FSTYPE,MOUNTPOINTS\nshows the drives: ROTA is 0 for "
            "flash; mount one of those. If this one is flash all the same: "
            f"echo 0 > /sys/block/{disk.name}/queue/rotational",
        )
        for disk in facts.disks
        if disk.is_rotational
    ]


def read_ahead(facts: Facts) -> list[Finding] | None:
    """The data path decides which read-ahead counts.

    With passthrough the kernel reads with the backing file's own state, which has the read-ahead of
    the drive (backing_file_read_iter in fs/backing-file.c; file_ra_state_init). The setting of the
    FUSE mount (bdi 0:N) counts on the daemon path only, in addition to the drive's.
    """
    path = facts.status.get("data_path")
    if path is None or (facts.device_read_ahead is None and facts.fuse_read_ahead is None):
        return None
    counting = [("the drive", facts.device_read_ahead)]
    if path == "daemon":
        counting.append(("the mount", facts.fuse_read_ahead))
    return [
        Finding(
            Severity.WARNING,
            f"the kernel reads {format_size(ahead.size_bytes)} ahead of readers on {whose}, which "
            "keeps a buffered load of a block far below the drive's speed (O_DIRECT is not "
            "affected)",
            f"echo {READ_AHEAD_WANTED_BYTES // KIB} > {ahead.path}",
        )
        for whose, ahead in counting
        if ahead is not None and ahead.size_bytes < _READ_AHEAD_LOW_BYTES
    ]


def dirty_limits(facts: Facts) -> list[Finding] | None:
    """Buffered stores fill memory up to these limits; then everybody waits for the drive."""
    if facts.dirty is None:
        return None
    limit_bytes = facts.dirty.limit_bytes
    if _DIRTY_LOW_BYTES <= limit_bytes <= _DIRTY_HIGH_BYTES:
        return []
    problem = (
        f"up to {format_size(limit_bytes)} may be written and not yet on a drive: a stall of many "
        "seconds when memory gets short, and at every unmount"
        if limit_bytes > _DIRTY_HIGH_BYTES
        else f"only {format_size(limit_bytes)} may be written ahead of the drive: every buffered "
        "store waits for it"
    )
    return [
        Finding(
            Severity.WARNING,
            problem,
            f"sysctl -w vm.dirty_background_bytes={_DIRTY_BACKGROUND_WANTED_BYTES} "
            f"vm.dirty_bytes={_DIRTY_WANTED_BYTES}\nfor good: the same in /etc/sysctl.d/kvfs.conf",
        )
    ]


def page_cache(facts: Facts) -> list[Finding] | None:
    """With zone_reclaim_mode a node drops its page cache although another has free memory."""
    if facts.zone_reclaim_mode is None:
        return None
    if facts.zone_reclaim_mode == 0:
        return []
    return [
        Finding(
            Severity.WARNING,
            f"vm.zone_reclaim_mode is {facts.zone_reclaim_mode}: cached blocks are thrown away "
            "while other NUMA nodes have free memory",
            "sysctl -w vm.zone_reclaim_mode=0",
        )
    ]


def mount_options(facts: Facts) -> list[Finding] | None:
    """kvfs chooses the options for its own drive, but not for the file system below a directory.

    ext4(5), xfs(5), mount(8).
    """
    if facts.kind == "block":
        return []
    if facts.backing is None:
        return None
    where = shlex.quote(facts.backing.mountpoint)
    found = []
    for option in sorted(facts.backing.options & _COSTLY.keys()):
        cost, instead = _COSTLY[option]
        fix = f"mount -o remount,{instead} {where}"
        if option in _NEEDS_NEW_MOUNT:
            again = f"mount -o {instead} {shlex.quote(facts.backing.source)} {where}"
            fix = f"{_without_pool(facts, f'umount {where} && {again}')}\nand in /etc/fstab"
        found.append(
            Finding(
                Severity.WARNING if option in _SEVERE else Severity.NOTE,
                f"{facts.backing.mountpoint}, which holds {facts.source}, is mounted with "
                f"{option}: {cost}",
                fix,
            )
        )
    return found


def below_mount(facts: Facts) -> list[Finding] | None:
    """While nothing is mounted, clients fill the disk on which the mountpoint lies."""
    if facts.below is None:
        return None
    if not facts.below.files:
        return []
    at_least = "" if facts.below.is_whole else "at least "
    parent, name = facts.mountpoint.rsplit("/", 1)
    shown = f'"$d"/{shlex.quote(name)}'
    return [
        Finding(
            Severity.WARNING,
            f"{at_least}{format_size(facts.below.size_bytes)} in {facts.below.files} files are in "
            f"the directory {facts.mountpoint} itself, hidden by the mount: they were stored while "
            "nothing was mounted there, on the file system below",
            f'd=$(mktemp -d) && mount --bind {shlex.quote(parent or "/")} "$d" && '
            f'ls -lR {shown}; umount "$d"; rmdir "$d"\n'
            "which shows them; move or remove them in the same way. To prevent it, start clients "
            "after the mount, or make the empty directory immutable with `chattr +i`",
        )
    ]


def _without_pool(facts: Facts, commands: str) -> str:
    """Return *commands* that need an unused pool, with the unmount and mount around them."""
    where, source = shlex.quote(facts.mountpoint), shlex.quote(facts.source)
    return f"kvfs umount {where} && {commands} && kvfs mount {source} {where}"


def _made_anew(facts: Facts, device: str) -> str:
    """Return the commands that make the XFS on *device* as kvfs would."""
    source = shlex.quote(facts.source)
    if facts.kind != "directory" or facts.backing is None:
        remark = "erases the pool: only if a cold cache costs less"
        return f"{_without_pool(facts, f'kvfs mkfs --force {source}')}\n{remark}"
    home, drive = shlex.quote(facts.backing.mountpoint), shlex.quote(device)
    commands = (
        f"umount {home} && mkfs.xfs -f -i {XFS_INODES} -m {XFS_TREES} {drive} && "
        f"mount {drive} {home} && mkdir -p {source}"
    )
    remark = f"erases all of {facts.backing.mountpoint}: only if it is to be formatted anyway"
    return f"{_without_pool(facts, commands)}\n{remark}"


def xfs(facts: Facts) -> list[Finding] | None:
    """kvfs formats its own XFS; the XFS below a directory may have been made with other options."""
    if facts.xfs is None:
        return [] if facts.backing is not None and facts.backing.fs_type != "xfs" else None
    made = facts.xfs
    found = []
    again = _made_anew(facts, made.device)
    if made.inode_bytes < XFS_INODE_BYTES:
        problem = (
            f"the XFS on {made.device} has inodes of {made.inode_bytes} bytes: the identity "
            "of a block does not fit in, and each store writes one more block"
        )
        found.append(Finding(Severity.NOTE, problem, again))
    if made.log_bytes < _LOG_LOW_BYTES and made.size_bytes >= _LOG_MATTERS_FROM_BYTES:
        problem = (
            f"the log of the XFS on {made.device} is {format_size(made.log_bytes)}: bursts of "
            "stores and evictions wait for it"
        )
        wider = again.replace("-m ", "-l size=256m -m ")
        found.append(Finding(Severity.NOTE, problem, wider))
    trees = [
        name for name, has in (("reflink", made.has_reflink), ("rmapbt", made.has_rmapbt)) if has
    ]
    if trees:
        problem = (
            f"the XFS on {made.device} keeps {' and '.join(trees)} trees, which kvfs does "
            "not use: each allocation updates them"
        )
        found.append(Finding(Severity.NOTE, problem, again))
    return found
