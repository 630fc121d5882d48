"""What sysfs shows of the drives of a pool, of what lies between, and of GPUs beside them.

sysfs(5), Documentation/block/queue-sysfs.rst, Documentation/admin-guide/md.rst, and for the link of
a drive Documentation/ABI/testing/sysfs-bus-pci. Nothing is opened but files of sysfs.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvfs.core.sizes import KIB
from kvfs.doctor.facts import Disk, DriveBelow, Gpu, Link, ReadAheadSetting, Volume

#: ``16.0 GT/s PCIe``; a device that does not know says ``Unknown``.
_GIGATRANSFERS: Final = re.compile(r"([\d.]+) GT/s")
#: Prefixes of what the device mapper calls a volume's UUID: dmraid's RAID, and ways to one disk.
_DMRAID: Final = "DMRAID-"
_MULTIPATH: Final = "mpath-"
#: In the names of the parts of which LVM makes a RAID (lvmraid(7)).
_LVM_RAID_PART: Final = "_rimage_"
#: PCI classes (pci_ids.h): 3D controller, other display controller, processing accelerator. A VGA
#: controller may be that of the board, and counts if it is of a maker of GPUs.
_GPU_CLASSES: Final = ("0x0302", "0x0380", "0x1200")
_VGA_CLASS: Final = "0x0300"
_GPU_MAKERS: Final = ("0x10de", "0x1002")


class Drives:
    """The block devices and GPUs of the machine whose sysfs is *sysfs*; tests give another one."""

    def __init__(self, sysfs: str = "/sys") -> None:
        self._sysfs = Path(sysfs)

    def below(self, number: int, source: str, kind: str) -> DriveBelow | None:
        """Return what drive *number* of a pool, with *source*, lies on. None: it is not to be seen.

        *kind* is that of the source; empty if it cannot be looked at.
        """
        try:
            device = self._device_of(source, kind)
            if device is None:
                return None
            # For an image, that below the loop device has the bytes.
            home = os.stat(source).st_dev if kind == "image" else device
        except OSError:
            return None
        volumes = tuple(self._volumes(self._whole(home)))
        return DriveBelow(number, source, self.under(home), volumes, self.read_ahead(device))

    def _device_of(self, source: str, kind: str) -> int | None:
        """Return the number of the device that the file system of the drive lies on."""
        if kind == "block":
            return os.stat(source).st_rdev
        if kind == "image":
            return self._loop_of(os.path.realpath(source))
        return os.stat(source).st_dev if kind else None

    def under(self, device_number: int) -> tuple[Disk, ...]:
        """Return the drives below a device: the drive of a partition, the members of a RAID.

        *device_number* is a st_dev or st_rdev. Empty if it is not a block device.
        """
        top = self._whole(device_number)
        return tuple(self._disk(name) for name in self._bottom(top)) if top else ()

    def read_ahead(self, device_number: int) -> ReadAheadSetting | None:
        """Return the read-ahead that a file system on the device uses."""
        top = self._whole(device_number)
        return self._read_ahead(f"block/{top}/queue/read_ahead_kb") if top else None

    def mount_read_ahead(self, device_number: int) -> ReadAheadSetting | None:
        """Return the read-ahead of a mount without a drive, such as a FUSE mount."""
        number = f"{os.major(device_number)}:{os.minor(device_number)}"
        return self._read_ahead(f"class/bdi/{number}/read_ahead_kb")

    def gpus(self) -> tuple[Gpu, ...] | None:
        """Return the GPUs of which the kernel knows the NUMA node; None where there is no PCI."""
        devices = self._sysfs / "bus" / "pci" / "devices"
        if not devices.is_dir():
            return None
        found = []
        for address in sorted(device.name for device in devices.iterdir()):
            place = f"bus/pci/devices/{address}"
            node = self._text(f"{place}/numa_node")
            if self._is_gpu(place) and node.isdigit():  # -1: it does not know
                found.append(Gpu(address, int(node)))
        return tuple(found)

    def _is_gpu(self, place: str) -> bool:
        of_class = self._text(f"{place}/class")[: len(_VGA_CLASS)]
        is_makers = self._text(f"{place}/vendor") in _GPU_MAKERS
        return of_class in _GPU_CLASSES or (of_class == _VGA_CLASS and is_makers)

    def _loop_of(self, image: str) -> int | None:
        """Return the number of the loop device over the file *image*."""
        for device in self._sysfs.glob("block/loop*"):
            if self._text(f"block/{device.name}/loop/backing_file") == image:
                major, minor = self._text(f"block/{device.name}/dev").split(":")
                return os.makedev(int(major), int(minor))
        return None

    def _whole(self, device_number: int) -> str:
        """Return the name of the drive or volume; for a partition, the name of its drive."""
        number = f"{os.major(device_number)}:{os.minor(device_number)}"
        link = self._sysfs / "dev" / "block" / number
        if not link.exists():
            return ""
        device = link.resolve()
        return device.parent.name if (device / "partition").exists() else device.name

    def _members(self, name: str) -> list[str]:
        """Return the drives and volumes on which volume *name* lies; empty for a drive."""
        below = self._sysfs / "block" / name / "slaves"
        members = sorted(member.name for member in below.iterdir()) if below.is_dir() else []
        found: dict[str, None] = {}
        for member in members:
            whole = (self._sysfs / "class" / "block" / member).resolve()
            found[whole.parent.name if (whole / "partition").exists() else member] = None
        return list(found)

    def _bottom(self, name: str) -> list[str]:
        found: dict[str, None] = {}
        for member in self._members(name):
            found |= dict.fromkeys(self._bottom(member))
        return list(found) or [name]

    def _volumes(self, name: str) -> Iterator[Volume]:
        """Yield the volumes from *name* down that make one device of several drives."""
        if not name or not (members := self._members(name)):
            return
        level = self._level(name, members)
        if level:
            yield Volume(name, level, tuple(self._bottom(name)))
            return
        for member in members:
            yield from self._volumes(member)

    def _level(self, name: str, members: list[str]) -> str:
        """Return which RAID volume *name* is: md's name of it, ``raid``, or ``several`` drives."""
        if level := self._text(f"block/{name}/md/level"):
            return level
        uuid = self._text(f"block/{name}/dm/uuid")
        if uuid.startswith(_MULTIPATH):
            return ""
        parts = (self._text(f"block/{member}/dm/name") for member in members)
        if uuid.startswith(_DMRAID) or any(_LVM_RAID_PART in part for part in parts):
            return "raid"
        return "several" if len(self._bottom(name)) > 1 and len(members) > 1 else ""

    def _disk(self, name: str) -> Disk:
        chosen = self._text(f"block/{name}/queue/scheduler")
        active = chosen.partition("[")[2].partition("]")[0]
        # An NVMe namespace has its controller's node, one directory further up.
        nodes = [self._text(f"block/{name}/{up}numa_node") for up in ("device/", "device/device/")]
        return Disk(
            name,
            active,
            self._text(f"block/{name}/queue/rotational") == "1",
            int(next((node for node in nodes if node), "-1")),
            self._text(f"block/{name}/device/model"),
            self._link(f"block/{name}/device/device"),
            self._unit(name),
        )

    def _link(self, place: str) -> Link | None:
        """Return how the PCI device at *place* is connected now; None if it is none."""
        speed = _GIGATRANSFERS.match(self._text(f"{place}/current_link_speed"))
        lanes = self._text(f"{place}/current_link_width")
        if speed is None or not lanes.isdigit() or lanes == "0":
            return None
        return Link(float(speed[1]), int(lanes))

    def _unit(self, name: str) -> str:
        """Return the NVMe controller or subsystem of drive *name*; empty if it has none."""
        device = self._sysfs / "block" / name / "device"
        return device.resolve().name if name.startswith("nvme") and device.exists() else ""

    def _read_ahead(self, file: str) -> ReadAheadSetting | None:
        text = self._text(file)
        return ReadAheadSetting(int(text) * KIB, f"/sys/{file}") if text.isdigit() else None

    def _text(self, file: str) -> str:
        try:
            return (self._sysfs / file).read_text().strip()
        except OSError:
            return ""
