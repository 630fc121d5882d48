"""Rules about the pool: what can be evicted, what keeps the rest, its durability and data path."""

import shlex
from typing import Any, Final

from kvfs.core.index_room import IndexRoom
from kvfs.core.sizes import format_size
from kvfs.doctor.facts import Facts
from kvfs.doctor.finding import Finding, Severity

#: A process is at the limit (lease_max) alone if its leases are this share of it: what was refused
#: would have been the rest, and the limit moves with what the device can hold.
_AT_LIMIT_SHARE: Final = 0.98
#: Of the capacity. With less to evict, a burst of stores gets ENOSPC.
_EVICTABLE_SHARE_MIN: Final = 0.05
#: A pool that is emptier than this has enough space without evicting.
_FULL_SHARE: Final = 0.9
#: A burst may take the device longer than the window; this many windows are more than a burst.
_LATE_WINDOWS: Final = 2
#: Of what the index has on its tmpfs: less is soon taken.
_MEMORY_PART: Final = 8
#: Fewer reads say nothing. Below this size a read is hardly more than its request: on two busy
#: cores the server took 100 to 150 us for one of 4, 16 or 64 KiB, and 470 us for one of a MiB.
_READS_MIN: Final = 10_000
_READ_SMALL_BYTES: Final = 64 << 10


def evictable_data(facts: Facts) -> list[Finding] | None:
    """A full pool without evictable blocks answers ENOSPC."""
    capacity_bytes = facts.status.get("capacity_bytes")
    used_bytes = facts.status.get("used_bytes")
    evictable_bytes = evictable_of(facts)
    if capacity_bytes is None or used_bytes is None or evictable_bytes is None:
        return None
    if (
        used_bytes < _FULL_SHARE * capacity_bytes
        or evictable_bytes >= _EVICTABLE_SHARE_MIN * capacity_bytes
    ):
        return []
    held = ", ".join(f"{name} {format_size(size)}" for name, size in _held(facts) if size)
    return [
        Finding(
            Severity.SERIOUS,
            f"{format_size(used_bytes)} of {format_size(capacity_bytes)} is used and only "
            f"{format_size(evictable_bytes)} of it can be evicted ({held or 'cause unknown'}): "
            "stores will fail with ENOSPC",
            _let_go(facts),
        )
    ]


def _let_go(facts: Facts) -> str:
    """Return the command that frees what keeps the most bytes from eviction."""
    where = shlex.quote(facts.mountpoint)
    largest = max(_held(facts), key=lambda held: held[1], default=("", 0))[0]
    if largest == "pinned":
        return f"kvfs unpin --all {where}\nkvfs pin --list {where} shows what is pinned"
    lessee = lessee_of(facts)
    most = f" (most leases: {lessee})" if lessee else ""
    return (
        f"fuser --verbose --mount {where}\nleases and slabs end with the process that made them"
        f"{most}: end it, or lower its own limit or lease_max"
    )


def evictable_of(facts: Facts) -> int | None:
    """Return the bytes that kvfs may evict: the server's figure, or the sum over the states."""
    said = facts.status.get("evictable_bytes")
    if isinstance(said, int):
        return said
    states = facts.status.get("states")
    if not isinstance(states, dict):
        return None
    return sum(int(states.get(state, {}).get("bytes", 0)) for state in _MAY_GO)


#: States that may be evicted (kvfs/core/lifecycle.py).
_MAY_GO: Final = ("published", "orphan_slab", "orphan")


def _held(facts: Facts) -> list[tuple[str, int]]:
    """Return what keeps bytes from eviction: causes, each with its bytes."""
    named = [
        (name, int(facts.status[f"{name}_bytes"]))
        for name in ("leased", "slab", "pinned", "open")
        if isinstance(facts.status.get(f"{name}_bytes"), int)
    ]
    if named:
        return named
    states = facts.status.get("states", {})
    return [
        (str(state), int(row.get("bytes", 0)))
        for state, row in states.items()
        if state not in (*_MAY_GO, "preallocated")
    ]


def backing_space(facts: Facts) -> list[Finding] | None:
    """A directory shares its file system: others may have taken space that the pool counts on."""
    if facts.kind in ("block", "image"):
        return []  # not shared: an image is allocated in full
    if facts.backing is None or "capacity_bytes" not in facts.status:
        return None
    capacity_bytes, used_bytes = facts.status["capacity_bytes"], facts.status["used_bytes"]
    ready_bytes = facts.status.get("preallocated_bytes", 0)
    wanted_bytes = capacity_bytes - used_bytes - ready_bytes
    lacking_bytes = wanted_bytes - facts.backing.free_bytes
    if lacking_bytes <= 0:
        return []
    held_bytes = capacity_bytes - lacking_bytes
    return [
        Finding(
            Severity.SERIOUS,
            f"{facts.source} is on a file system with {format_size(facts.backing.free_bytes)} "
            f"free, and the pool may still grow by {format_size(wanted_bytes)}: others "
            "fill it, and stores will fail with ENOSPC",
            f"kvfs umount {shlex.quote(facts.mountpoint)} && kvfs mount --capacity "
            f"{max(0, held_bytes) * 9 // 10} {shlex.quote(facts.source)} "
            f"{shlex.quote(facts.mountpoint)}",
        )
    ]


def damage(facts: Facts) -> list[Finding] | None:
    """Damage is a miss and a counter; a counter that grows means that the drive is dying."""
    if facts.status.get("device_lost"):
        problem = f"{facts.source} is lost: {facts.status['device_lost']}; every name is a miss"
        where, source = shlex.quote(facts.mountpoint), shlex.quote(facts.source)
        fix = f"dmesg --level=err,warn | tail\nkvfs umount {where} && kvfs mount {source} {where}"
        return [Finding(Severity.SERIOUS, problem, fix)]
    if "damaged_rows" not in facts.status:
        return None
    found = []
    if silent_s := facts.status.get("device_silent_s"):
        problem = (
            f"{facts.source} has not answered for {silent_s:g} s: what needs it waits in the "
            "kernel, and goes on when it answers"
        )
        fix = "dmesg --level=err,warn | tail\nand kill nothing: no signal ends such a wait"
        found.append(Finding(Severity.SERIOUS, problem, fix))
    check = (
        f"kvfs umount {shlex.quote(facts.mountpoint)} && kvfs fsck --repair "
        f"{shlex.quote(facts.source)} && kvfs mount {shlex.quote(facts.source)} "
        f"{shlex.quote(facts.mountpoint)}"
    )
    if facts.status.get("write_back_failures"):
        count = facts.status["write_back_failures"]
        problem = (
            f"blocks could not be written back {count} times: the device loses data, and "
            f"{facts.status.get('lost_blocks', 0)} blocks became misses"
        )
        fix = "dmesg --level=err,warn | tail\nand replace the drive that it names"
        found.append(Finding(Severity.SERIOUS, problem, fix))
    if facts.status["damaged_rows"]:
        count = facts.status["damaged_rows"]
        problem = f"{count} rows of the index cannot be read; their blocks are misses"
        found.append(Finding(Severity.WARNING, problem, check))
    if facts.status.get("background_failures"):
        count = facts.status["background_failures"]
        problem = f"{count} background jobs failed; the log says why"
        found.append(Finding(Severity.WARNING, problem, "dmesg --level=err,warn | tail\n" + check))
    return found


def units(facts: Facts) -> list[Finding] | None:
    """A unit of ``evict=together`` has grown too large: its files are evicted one by one."""
    if "together" not in facts.status:
        return None
    where = facts.mountpoint.rstrip("/")
    return [
        Finding(
            Severity.WARNING,
            f"{path} is under evict=together and too large for that: its files are evicted one by "
            "one, and what needs them all may break",
            f"kvfs status {shlex.quote(facts.mountpoint)}\nshows the units; kvfs evict "
            f"{shlex.quote(where + path)} empties it; a mount with a higher together_max bears it",
        )
        for path in facts.status["together"]["too_large"]
    ]


def durability(facts: Facts) -> list[Finding] | None:
    """A power loss takes what is not durable; the window says how much that is at most."""
    told = facts.status.get("durability")
    if not isinstance(told, dict):
        return None
    within_s, oldest_s = float(told.get("within_s", 0)), float(told.get("oldest_s", 0))
    if not within_s or oldest_s <= _LATE_WINDOWS * within_s:
        return []
    where = shlex.quote(facts.mountpoint)
    return [
        Finding(
            Severity.WARNING,
            f"{told.get('blocks', 0)} blocks ({format_size(int(told.get('bytes', 0)))}) are not "
            f"durable, the oldest for {oldest_s:.0f} s; durable_within_s is {within_s:g}: the "
            "device does not keep pace with the stores, and a power loss takes them",
            f"kvfs umount {where} && kvfs mount --set durable_within_s={2 * oldest_s:.0f} "
            f"{shlex.quote(facts.source)} {where}\nif that much may be lost; else use a faster "
            "drive, or store less",
        )
    ]


def index_map(facts: Facts) -> list[Finding] | None:
    """The index's map bounds the number of names: when it is full, new names evict old ones."""
    if "index_used_bytes" not in facts.status or "index_map_bytes" not in facts.status:
        return None
    rows_bytes, map_bytes = facts.status["index_used_bytes"], facts.status["index_map_bytes"]
    if not IndexRoom(map_bytes, lambda: rows_bytes).binds():
        return []
    where = shlex.quote(facts.mountpoint)
    return [
        Finding(
            Severity.WARNING,
            f"names fill {format_size(rows_bytes)} of the {format_size(map_bytes)} that the index "
            "may use: blocks are evicted for names although there is space for data",
            f"kvfs umount {where} && kvfs mount --set index_map_bytes={2 * map_bytes} "
            f"{shlex.quote(facts.source)} {where}\n"
            "and in the settings file, if there is one",
        )
    ]


def index_memory(facts: Facts) -> list[Finding] | None:
    """The index is on a tmpfs that others fill, too: when it is full, new names evict old ones."""
    memory = facts.status.get("index_memory")
    if memory is None or memory.get("bytes") is None:
        return None
    free_bytes = memory["free_bytes"]
    if not memory["full"] and free_bytes >= memory["bytes"] // _MEMORY_PART:
        return []
    place = shlex.quote(facts.status["index_in"].rsplit("/", 2)[0])
    problem = (
        "blocks are evicted for names although there is space for data"
        if memory["full"]
        else "when it is full, blocks are evicted for names although there is space for data"
    )
    return [
        Finding(
            Severity.SERIOUS if memory["full"] else Severity.WARNING,
            f"{place}, where the index has {format_size(memory['bytes'])}, has "
            f"{format_size(free_bytes)} left: {problem}",
            f"du -sh {place}/*; mount -o remount,size=75% {place}\n"
            "or set index_memory_dir to a larger tmpfs, or index_place = pool",
        )
    ]


def passthrough(facts: Facts) -> list[Finding] | None:
    """Without passthrough every byte is copied through the server."""
    path = facts.status.get("data_path")
    if path is None:
        return None
    if path == "passthrough":
        return []
    reason = str(facts.status.get("data_path_reason", ""))
    again = f"kvfs umount {shlex.quote(facts.mountpoint)} && kvfs mount "
    where = f"{shlex.quote(facts.source)} {shlex.quote(facts.mountpoint)}"
    if "asked for" in reason:
        fix = f"{again}--data-path=auto {where}"
    elif "overlayfs" in reason:
        fix = (
            "lsblk --output NAME,SIZE,ROTA,FSTYPE,MOUNTPOINTS\nshows the drives: mount a blank "
            "one, or a directory that is not on overlayfs"
        )
    elif "CAP_SYS_ADMIN" in reason:
        fix = f"{again}{where}\nas root, in a container with --cap-add SYS_ADMIN --device /dev/fuse"
    else:
        fix = (
            ". /etc/os-release && apt-get install --yes -t $VERSION_CODENAME-backports "
            "linux-image-amd64\nwith backports among the sources of apt; then reboot: 6.9 or later"
        )
    problem = f"bytes go through the server ({reason}): some 1-2 GB/s instead of the drives' speed"
    return [Finding(Severity.WARNING, problem, fix)]


def small_reads(facts: Facts) -> list[Finding] | None:
    """On the daemon path each read is a request; with passthrough the server sees none."""
    requests, asked_bytes = facts.status.get("requests"), facts.status.get("server_read_bytes")
    if requests is None or asked_bytes is None:
        return None
    reads = requests.get("READ", 0)
    if reads < _READS_MIN or asked_bytes >= reads * _READ_SMALL_BYTES:
        return []
    problem = (
        f"clients read {format_size(asked_bytes // reads)} at a time, in {reads:,} requests: each "
        "one wakes the server, which takes longer than to copy the bytes"
    )
    fix = (
        f"kvfs status {shlex.quote(facts.mountpoint)}\n"
        "shows the time of a READ. Let the connector read a block in one call, or without O_DIRECT "
        "(the kernel then reads ahead), or give the mount passthrough (docs/performance.md)"
    )
    return [Finding(Severity.WARNING, problem, fix)]


def leases(facts: Facts) -> list[Finding] | None:
    """A process with more leases than its share cannot store under final names."""
    leased_bytes, most_bytes = facts.status.get("leased_bytes"), facts.status.get("lease_max_bytes")
    if leased_bytes is None or most_bytes is None:
        return None
    lessee: dict[str, Any] | None = facts.status.get("largest_lease_holder")
    if lessee is None:
        return []
    refused, own_bytes = lessee.get("stores_refused", 0), int(lessee.get("bytes", 0))
    is_at_limit = refused and own_bytes >= _AT_LIMIT_SHARE * most_bytes
    if leased_bytes <= most_bytes and not is_at_limit:
        return []
    alone = "; by its own it is at the limit" if own_bytes >= _AT_LIMIT_SHARE * most_bytes else ""
    return [
        Finding(
            Severity.WARNING,
            f"leases hold {format_size(leased_bytes)}, lease_max allows {format_size(most_bytes)}"
            f"{_of_usable(facts)}: {lessee_of(facts)} holds most, and processes over their share "
            f"cannot store under final names ({refused} stores refused so far)"
            f"{alone}",
            f"setfattr -n user.kvfs.lease -v none {shlex.quote(facts.mountpoint)}\n"
            "if the programs there tolerate the loss of a stored block; else end the process, or "
            "lower its own limit",
        )
    ]


def _of_usable(facts: Facts) -> str:
    """Return what the limits are shares of, if that is less than the capacity."""
    usable_bytes, capacity_bytes = (
        facts.status.get("usable_bytes"),
        facts.status.get("capacity_bytes"),
    )
    if usable_bytes is None or capacity_bytes is None or usable_bytes >= capacity_bytes:
        return ""
    return (
        f" (the pool can hold {format_size(usable_bytes)} of its capacity of "
        f"{format_size(capacity_bytes)}; lease_max and pin_share are shares of that)"
    )


def lessee_of(facts: Facts) -> str | None:
    """Return who holds the most by leases, as text; None if nobody is known."""
    lessee = facts.status.get("largest_lease_holder")
    if not isinstance(lessee, dict):
        return None
    if not lessee.get("pid"):
        return "processes that cannot be watched (NFS, another pid namespace)"
    return f"process {lessee['pid']} ({lessee.get('program', '?')})"
