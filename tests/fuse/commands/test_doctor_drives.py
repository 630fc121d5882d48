"""What ``kvfs doctor`` sees of drives, what is below them, and GPUs: by a sysfs given to it."""

import contextlib
from pathlib import Path

import pytest

from kvfs.core.source_list import listed
from kvfs.doctor.drive_rules import gpu_nodes, raid, shared_device, unlike_drives
from kvfs.doctor.facts import DriveBelow, Facts, Gpu, Link, Volume
from kvfs.doctor.finding import Finding
from kvfs.doctor.gather import gather
from kvfs.doctor.gather_drives import Drives
from tests.support.doctor.sysfs_tree import SysfsTree
from tests.support.mounts.mounting import Mounted, own_tmpfs, skip_without_mounts, workplace


@pytest.fixture
def tree(tmp_path: Path) -> SysfsTree:
    return SysfsTree(tmp_path)


def pool_on(tree: SysfsTree, *sources: str) -> tuple[DriveBelow, ...]:
    """Return the drives of a pool on block devices of *tree*."""
    machine = Drives(str(tree.root))
    found = [machine.below(number, source, "block") for number, source in enumerate(sources)]
    assert None not in found
    return tuple(one for one in found if one is not None)


def problems(found: list[Finding] | None) -> list[str]:
    assert found is not None
    return [finding.problem for finding in found]


def nvme(tree: SysfsTree, number: int, **files: str) -> str:
    """Make an NVMe drive with one namespace; return its node."""
    told = {
        "model": "A",
        "device/numa_node": "0",
        "device/current_link_speed": "16.0 GT/s PCIe",
        "device/current_link_width": "4",
    } | {f"device/{name}" if name != "model" else name: text for name, text in files.items()}
    return tree.block(f"nvme{number}n1", controller=tree.hardware(f"nvme{number}", told))


def test_drives_that_are_alike_have_no_findings(tree: SysfsTree) -> None:
    drives = pool_on(tree, nvme(tree, 0), nvme(tree, 1), nvme(tree, 2))
    (disk,) = drives[1].disks
    assert (disk.name, disk.unit, disk.model) == ("nvme1n1", "nvme1", "A")
    assert (disk.link, disk.numa_node) == (Link(16.0, 4), 0)
    facts = Facts("/kv", drives=drives)
    assert [rule(facts) for rule in (shared_device, unlike_drives, raid)] == [[], [], []]


def test_partitions_and_namespaces_of_one_drive_are_one_device(tree: SysfsTree) -> None:
    first, other = nvme(tree, 0), nvme(tree, 1)
    parts = [tree.partition(f"nvme0n1p{number}", "nvme0n1") for number in (1, 2)]
    again = tree.block("nvme0n2", controller="nvme0")
    for sources in (parts, [first, again]):
        (problem,) = problems(shared_device(Facts("/kv", drives=pool_on(tree, *sources, other))))
        assert "drives 0 and 1 of the pool lie on one device" in problem
    assert shared_device(Facts("/kv", drives=pool_on(tree, first, other))) == []


def test_a_drive_with_a_narrow_link_is_the_slow_one(tree: SysfsTree) -> None:
    slow = {"current_link_speed": "16.0 GT/s PCIe", "current_link_width": "2"}
    drives = pool_on(tree, nvme(tree, 0, **slow), nvme(tree, 1), nvme(tree, 2, model="B"))
    (problem,) = problems(unlike_drives(Facts("/kv", drives=drives)))
    assert "drive 0 (nvme0n1) has a link of 16 GT/s x2, and drive 1 (nvme1n1) one of" in problem
    unknown = nvme(tree, 3, current_link_speed="Unknown", current_link_width="0")
    drives = pool_on(tree, unknown, nvme(tree, 4))
    assert drives[0].disks[0].link is None
    assert unlike_drives(Facts("/kv", drives=drives)) == []


def test_what_rotates_and_what_is_of_another_model_is_told(tree: SysfsTree) -> None:
    disk = tree.block("sda", {"queue/rotational": "1", "device/model": "C"})
    fast = nvme(tree, 0)
    (problem,) = problems(unlike_drives(Facts("/kv", drives=pool_on(tree, fast, disk))))
    assert "drive 1 (sda) rotates" in problem
    other = nvme(tree, 1, model="B")
    (problem,) = problems(unlike_drives(Facts("/kv", drives=pool_on(tree, fast, other))))
    assert "drive 0: A; drive 1: B" in problem


def test_a_raid_below_a_drive_is_found(tree: SysfsTree) -> None:
    """Also below an encrypted one; and a way to one disk, or a mapping over it, is none."""
    for name in ("sda", "sdb", "sdc", "sdd"):
        tree.block(name)
    parts = [tree.partition(f"{name}1", name) and f"{name}1" for name in ("sda", "sdb")]
    md = tree.block("md0", {"md/level": "raid5\n"}, lies_on=parts)
    both = ("sda", "sdb")
    assert pool_on(tree, md)[0].volumes == (Volume("md0", "raid5", both),)
    crypt = tree.block("dm-0", {"dm/uuid": "CRYPT-LUKS2-x"}, lies_on=["md0"])
    assert pool_on(tree, crypt)[0].volumes == (Volume("md0", "raid5", both),)
    for number in (1, 2):
        tree.block(f"dm-{number}", {"dm/name": f"vg-kv_rimage_{number}"}, lies_on=["sda"])
    lvm = tree.block("dm-3", {"dm/uuid": "LVM-x"}, lies_on=["dm-1", "dm-2"])
    assert pool_on(tree, lvm)[0].volumes == (Volume("dm-3", "raid", ("sda",)),)
    striped = tree.block("dm-4", {"dm/uuid": "LVM-y"}, lies_on=["sda", "sdb"])
    assert pool_on(tree, striped)[0].volumes == (Volume("dm-4", "several", both),)
    fake = tree.block("dm-5", {"dm/uuid": "DMRAID-z"}, lies_on=["sda", "sdb"])
    assert pool_on(tree, fake)[0].volumes == (Volume("dm-5", "raid", both),)
    ways = tree.block("dm-6", {"dm/uuid": "mpath-z"}, lies_on=["sda", "sdb"])
    linear = tree.block("dm-7", {"dm/uuid": "LVM-z"}, lies_on=["sdc"])
    drives = pool_on(tree, ways, linear)
    assert [drive.volumes for drive in drives] == [(), ()]
    assert raid(Facts("/kv", drives=drives)) == []
    (problem,) = problems(raid(Facts("/kv", drives=pool_on(tree, md))))
    assert "a raid5 of sda, sdb: each store reads and writes parity" in problem


def test_gpus_are_found_by_class_and_maker(tree: SysfsTree) -> None:
    tree.pci("0000:17:00.0", of_class="0x030200", of_vendor="0x10de", numa_node="0")
    tree.pci("0000:63:00.0", of_class="0x120000", of_vendor="0x1002", numa_node="1")
    tree.pci("0000:64:00.0", of_class="0x030000", of_vendor="0x10de", numa_node="1")
    tree.pci("0000:03:00.0", of_class="0x030000", of_vendor="0x1a03", numa_node="0")  # the board's
    tree.pci("0000:65:00.0", of_class="0x030200", of_vendor="0x10de", numa_node="-1")
    tree.pci("0000:66:00.0", of_class="0x010802", of_vendor="0x144d", numa_node="1")  # a drive
    gpus = Drives(str(tree.root)).gpus()
    assert gpus == (Gpu("0000:17:00.0", 0), Gpu("0000:63:00.0", 1), Gpu("0000:64:00.0", 1))
    near, far = nvme(tree, 0), nvme(tree, 1, numa_node="1")
    (drive,) = pool_on(tree, near)
    (problem,) = problems(gpu_nodes(Facts("/kv", disks=drive.disks, gpus=gpus)))
    assert "GPUs 0000:63:00.0, 0000:64:00.0 are on NUMA node 1" in problem
    disks = tuple(disk for drive in pool_on(tree, near, far) for disk in drive.disks)
    assert gpu_nodes(Facts("/kv", disks=disks, gpus=gpus)) == []
    (problem,) = problems(gpu_nodes(Facts("/kv", disks=disks, gpus=gpus[1:])))
    assert "nvme0n1 is on NUMA node 0, and the GPUs on node 1" in problem


def test_a_machine_that_does_not_tell_decides_nothing(tree: SysfsTree, tmp_path: Path) -> None:
    machine = Drives(str(tmp_path))
    assert machine.gpus() is None
    assert machine.below(0, str(tmp_path / "gone"), "block") is None
    assert machine.below(0, str(tmp_path), "") is None
    assert Drives(str(tree.root)).gpus() == ()
    facts = Facts("/kv")
    assert [rule(facts) for rule in (shared_device, unlike_drives, raid, gpu_nodes)] == [None] * 4


@pytest.mark.needs_fuse
def test_the_drives_of_a_mount_are_looked_at_each() -> None:
    """Those in memory lie on no device, and what is about drives is decided all the same."""
    skip_without_mounts()
    with workplace("disk") as place, contextlib.ExitStack() as stack:
        sources = [str(stack.enter_context(own_tmpfs())) for _ in range(2)]
        with Mounted(listed(sources), place / "kv") as mount:
            facts = gather(str(mount.path))
    assert facts.kind == "directory"
    assert facts.drives == tuple(
        DriveBelow(number, source, ()) for number, source in enumerate(sources)
    )
    assert [shared_device(facts), unlike_drives(facts), raid(facts)] == [[], [], []]
