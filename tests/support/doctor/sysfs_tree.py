"""A sysfs for tests: files in a directory that the doctor reads in place of the kernel's."""

import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path


def write_tree(root: Path, files: Mapping[str, str]) -> None:
    """Write *files*, by their paths below *root*."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class SysfsTree:
    """Block devices and PCI devices below *root*, with a device node for each of the former."""

    def __init__(self, root: Path) -> None:
        self.root = root / "sys"
        self._nodes = root / "dev"
        self._nodes.mkdir()
        for directory in ("block", "class/block", "dev/block", "devices", "bus/pci/devices"):
            (self.root / directory).mkdir(parents=True)
        self._minor = 0

    def block(
        self,
        name: str,
        files: Mapping[str, str] | None = None,
        *,
        lies_on: Iterable[str] = (),
        controller: str = "",
    ) -> str:
        """Make block device *name* on others; return its node. *controller* is its hardware."""
        self._minor += 1
        place = self.root / "devices" / "virtual" / name
        members = {f"slaves/{member}": "" for member in lies_on}
        write_tree(place, {"queue/rotational": "0", **members, **(files or {})})
        if controller:
            (place / "device").symlink_to(self.root / "devices" / controller)
        return self._linked(name, place, in_block=True)

    def partition(self, name: str, of: str) -> str:
        """Make a partition of block device *of*; return its node."""
        self._minor += 1
        place = self.root / "devices" / "virtual" / of / name
        write_tree(place, {"partition": "1"})
        return self._linked(name, place, in_block=False)

    def _linked(self, name: str, place: Path, *, in_block: bool) -> str:
        number = os.makedev(259, self._minor)
        for directory in ("class/block", *(["block"] if in_block else [])):
            (self.root / directory / name).symlink_to(place)
        (self.root / "dev" / "block" / f"259:{self._minor}").symlink_to(place)
        node = self._nodes / name
        os.mknod(node, stat.S_IFBLK | 0o600, number)
        return str(node)

    def hardware(self, name: str, files: Mapping[str, str]) -> str:
        """Make what a block device may have as its controller; return its name."""
        write_tree(self.root / "devices" / name, files)
        return name

    def pci(self, address: str, **files: str) -> None:
        """Make a PCI device; ``of_class`` is its file ``class``."""
        told = {name.removeprefix("of_"): text for name, text in files.items()}
        write_tree(self.root / "bus" / "pci" / "devices" / address, told)
