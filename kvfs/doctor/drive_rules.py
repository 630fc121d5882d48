"""Rules about the drives of a pool beside each other, what they lie on, and where GPUs are."""

import shlex
from collections.abc import Iterable, Sequence
from typing import Final

from kvfs.doctor.facts import DriveBelow, Facts, Volume
from kvfs.doctor.finding import Finding, Severity

#: By md's name of a level (Documentation/admin-guide/md.rst): how much it matters, and what it
#: costs a cache, which can lose a block and can be spread over drives without a RAID.
_ALL_GONE: Final = (Severity.NOTE, "what it holds is lost with any one of them")
_TWICE: Final = (Severity.NOTE, "each byte is written twice, and a cache does without the copy")
_PARITY: Final = (Severity.WARNING, "each store reads and writes parity, too")
_COSTS: Final = {
    **dict.fromkeys(("raid0", "linear", "several"), _ALL_GONE),
    **dict.fromkeys(("raid1", "raid10"), _TWICE),
    **dict.fromkeys(("raid4", "raid5", "raid6"), _PARITY),
}
_UNKNOWN_RAID: Final = (Severity.NOTE, "kvfs spreads blocks over drives itself, and outlives one")


def shared_device(facts: Facts) -> list[Finding] | None:
    """Two drives of a pool on one device are no faster than one, and go together."""
    if facts.drives is None:
        return None
    by_unit: dict[str, dict[int, str]] = {}
    for drive in facts.drives:
        for disk in drive.disks:
            by_unit.setdefault(disk.unit or disk.name, {})[drive.number] = disk.name
    shared: dict[tuple[int, ...], list[str]] = {}
    for names in by_unit.values():
        if len(names) > 1:
            shared.setdefault(tuple(names), []).append(" and ".join(sorted(set(names.values()))))
    where = shlex.quote(facts.mountpoint)
    return [
        Finding(
            Severity.WARNING,
            f"drives {' and '.join(map(str, numbers))} of the pool lie on one device "
            f"({', '.join(devices)}): they are no faster than one, and it takes them all when it "
            "dies",
            f"kvfs drive drain {where} {max(numbers)}\nthen `kvfs drive remove` when it is empty; "
            "`kvfs drive add` takes one that lies elsewhere",
        )
        for numbers, devices in shared.items()
    ]


def unlike_drives(facts: Facts) -> list[Finding] | None:
    """A chain of blocks lies on all drives in turn, and loads at the pace of the slowest."""
    if facts.drives is None:
        return None
    if len(facts.drives) < 2:
        return []
    # What differs in one of these differs in those after it for that reason.
    for rule in (_some_rotate, _narrow_links, _other_models):
        if (finding := rule(facts.drives, shlex.quote(facts.mountpoint))) is not None:
            return [finding]
    return []


def _some_rotate(drives: Sequence[DriveBelow], where: str) -> Finding | None:
    slow = [drive for drive in drives if any(disk.is_rotational for disk in drive.disks)]
    if not slow or any(not drive.disks for drive in drives) or len(slow) == len(drives):
        return None
    return Finding(
        Severity.WARNING,
        f"{_told(slow)} {_are(slow, 'rotates', 'rotate')} and the others do not: a chain of blocks "
        "lies on all, and loads as fast as on the slowest",
        f"kvfs drive drain {where} {slow[-1].number}\nthen `kvfs drive remove` when it is empty "
        "(not drive 0); one whose kernel is wrong: "
        f"echo 0 > /sys/block/{slow[-1].disks[0].name}/queue/rotational",
    )


def _narrow_links(drives: Sequence[DriveBelow], where: str) -> Finding | None:
    """Compare the links of drives that are one PCI device each; others have none of their own."""
    alone = [(drive, drive.disks[0].link) for drive in drives if len(drive.disks) == 1]
    known = [(drive, link) for drive, link in alone if link is not None]
    rates = [link.rate for _, link in known]
    slow = [(drive, link) for drive, link in known if link.rate < max(rates)]
    if not slow:
        return None
    drive, link = min(slow, key=lambda one: one[1].rate)
    fast, best = known[rates.index(max(rates))]
    return Finding(
        Severity.WARNING,
        f"{_told([drive])} has a link of {link.text}, and {_told([fast])} "
        f"one of {best.text}: a chain of blocks lies on all, and loads as fast as on the slowest",
        f"grep . /sys/block/{drive.disks[0].name}/device/device/*_link_*\nshows whether the drive "
        f"or its slot is the limit; without it: `kvfs drive drain {where} {drive.number}`, then "
        "`kvfs drive remove`",
    )


def _other_models(drives: Sequence[DriveBelow], where: str) -> Finding | None:
    """Two models are not known to differ in speed, so this is a note."""
    models = [{disk.model for disk in drive.disks if disk.model} for drive in drives]
    if not all(models) or len(set(map(frozenset, models))) == 1:
        return None
    shown = "; ".join(
        f"drive {drive.number}: {', '.join(sorted(names))}"
        for drive, names in zip(drives, models, strict=True)
    )
    return Finding(
        Severity.NOTE,
        f"the drives of the pool are of different models ({shown}), and a chain of blocks loads as "
        "fast as on the slowest",
        f"kvfs drive list {where}\nshows the slowest answer of each; one that is much slower costs "
        "the others their speed",
    )


def raid(facts: Facts) -> list[Finding] | None:
    """kvfs spreads blocks over drives itself, and one that dies costs its own blocks alone."""
    if facts.drives is None:
        return None
    return [_of_volume(drive, volume) for drive in facts.drives for volume in drive.volumes]


def _of_volume(drive: DriveBelow, volume: Volume) -> Finding:
    severity, cost = _COSTS.get(volume.level, _UNKNOWN_RAID)
    what = "a volume" if volume.level == "several" else f"a {volume.level}"
    return Finding(
        severity,
        f"drive {drive.number} of the pool, {drive.source}, lies on {volume.name}, {what} of "
        f"{', '.join(volume.disks)}: {cost}",
        f"lsblk --inverse --output NAME,TYPE,SIZE,MODEL,MOUNTPOINTS /dev/{volume.name}\nshows what "
        "is below. Without it, kvfs mkfs makes one pool of the drives themselves "
        "(docs/drives.md), and one that dies costs its own blocks",
    )


def gpu_nodes(facts: Facts) -> list[Finding] | None:
    """What is loaded to a GPU at another node than the drive crosses between the sockets."""
    if facts.gpus is None or facts.disks is None:
        return None
    gpus = _by_node((gpu.numa_node, gpu.address) for gpu in facts.gpus)
    disks = _by_node((disk.numa_node, disk.name) for disk in facts.disks if disk.numa_node >= 0)
    if not gpus or not disks:
        return []
    alone = {node: gpus[node] for node in sorted(gpus.keys() - disks.keys())}
    found = [
        _far(
            f"{_are(addresses, 'GPU', 'GPUs')} {', '.join(addresses)} "
            f"{_are(addresses, 'is', 'are')} on NUMA node {node}, and the drives of the pool on "
            f"{_listed(disks)}",
            f"/sys/bus/pci/devices/{addresses[0]}/numa_node",
        )
        for node, addresses in alone.items()
    ]
    if gpus.keys() & disks.keys():  # else all is said
        found += [
            _far(
                f"{', '.join(disks[node])} {_are(disks[node], 'is', 'are')} on NUMA node {node}, "
                f"and the GPUs on {_listed(gpus)}",
                f"/sys/bus/pci/devices/{next(iter(gpus.values()))[0]}/numa_node",
            )
            for node in sorted(disks.keys() - gpus.keys())
        ]
    return found


def _far(problem: str, file: str) -> Finding:
    return Finding(
        Severity.NOTE,
        f"{problem}: what is loaded crosses between the nodes",
        f"grep . {file}\nshows the node of one. Drives at the nodes of the GPUs are faster; with "
        "drives at each, a mount a node is the other way, for connectors that take a path for each "
        "GPU (docs/drives.md)",
    )


def _by_node(placed: Iterable[tuple[int, str]]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for node, name in placed:
        found.setdefault(node, []).append(name)
    return found


def _listed(by_node: Iterable[int]) -> str:
    nodes = sorted(by_node)
    return f"node{'s' if nodes[1:] else ''} {', '.join(map(str, nodes))}"


def _told(drives: Sequence[DriveBelow]) -> str:
    """Return *drives* with the names of their disks."""
    return " and ".join(
        f"drive {drive.number} ({', '.join(disk.name for disk in drive.disks)})" for drive in drives
    )


def _are(some: Sequence[object], one: str, more: str) -> str:
    return one if len(some) == 1 else more
