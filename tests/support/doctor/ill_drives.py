"""Pools whose drives `kvfs doctor` finds something about, and machines with GPUs far from them."""

from typing import Any, Final

from kvfs.doctor.facts import Disk, DriveBelow, Gpu, Link, Volume
from kvfs.doctor.finding import Severity

NOTE, WARNING = Severity.NOTE, Severity.WARNING
NVME: Final = Disk("nvme0n1", model="A", link=Link(16.0, 4))
MIRROR: Final = Volume("md0", "raid1", ("sda", "sdb"))


def pool(*of: Disk, volumes: tuple[Volume, ...] = ()) -> dict[str, Any]:
    """Return a pool whose drives are one of the disks *of* each, the last one on *volumes*."""
    drives = [DriveBelow(number, f"/data/{number}", (disk,)) for number, disk in enumerate(of)]
    return {"drives": (*drives[:-1], drives[-1]._replace(volumes=volumes))}


#: What is ill about the drives of a pool beside each other, and about where GPUs are.
ILL_DRIVES: Final = (
    (
        "GPUs",
        {"gpus": (Gpu("0000:4a:00.0", 0), Gpu("0000:4b:00.0", 0))},
        NOTE,
        "GPUs 0000:4a:00.0, 0000:4b:00.0 are on NUMA node 0, and the drives of the pool on node 1",
        "grep . /sys/bus/pci/devices/0000:4a:00.0/numa_node",
    ),
    (
        "one device",
        pool(NVME, Disk("nvme1n1"), NVME),
        WARNING,
        "drives 0 and 2 of the pool lie on one device (nvme0n1)",
        "kvfs drive drain /kv 2\n",
    ),
    (
        "one device",
        pool(Disk("nvme0n1", unit="nvme0"), Disk("nvme0n2", unit="nvme0")),
        WARNING,
        "lie on one device (nvme0n1 and nvme0n2)",
        "kvfs drive drain /kv 1\n",
    ),
    (
        "unlike drives",
        pool(NVME, Disk("sda", is_rotational=True)),
        WARNING,
        "drive 1 (sda) rotates and the others do not",
        "kvfs drive drain /kv 1\n",
    ),
    (
        "unlike drives",
        pool(NVME, NVME._replace(name="nvme1n1", link=Link(8.0, 4))),
        WARNING,
        "drive 1 (nvme1n1) has a link of 8 GT/s x4, and drive 0 (nvme0n1) one of 16 GT/s x4",
        "grep . /sys/block/nvme1n1/device/device/*_link_*\n",
    ),
    (
        "unlike drives",
        pool(NVME, NVME._replace(name="nvme1n1", model="B")),
        NOTE,
        "different models (drive 0: A; drive 1: B)",
        "kvfs drive list /kv\n",
    ),
    (
        "RAID",
        pool(NVME, volumes=(MIRROR,)),
        NOTE,
        "drive 0 of the pool, /data/0, lies on md0, a raid1 of sda, sdb: each byte is written",
        "lsblk --inverse --output NAME,TYPE,SIZE,MODEL,MOUNTPOINTS /dev/md0\n",
    ),
    *(
        ("RAID", pool(NVME, volumes=(MIRROR._replace(level=level),)), severity, says, "/dev/md0")
        for level, severity, says in (
            ("raid0", NOTE, "lost with any one of them"),
            ("raid5", WARNING, "reads and writes parity"),
            ("several", NOTE, "a volume of sda, sdb: what it holds is lost"),
            ("raid", NOTE, "spreads blocks over drives itself"),
        )
    ),
)
