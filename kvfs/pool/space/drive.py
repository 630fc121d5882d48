"""A drive of a pool: whether it answers, what is taken there, and what gives some back."""

from dataclasses import dataclass

from kvfs.core.headroom import Headroom
from kvfs.core.types import DriveNo, InodeNo
from kvfs.pool.space.device_probe import DeviceProbe
from kvfs.pool.space.space import DeviceRoom, Space
from kvfs.pool.space.unlink_queue import UnlinkQueue


@dataclass(frozen=True, eq=False)
class PoolDrive:
    """One drive; found by an inode, whose file it holds (``SpaceParts.drives``)."""

    number: DriveNo
    #: No inode has this number, which stands for the drive where one is asked for by an inode.
    ino: InodeNo
    #: Whether it answers.
    probe: DeviceProbe
    space: Space
    #: What is kept free there ahead of writers.
    headroom: Headroom
    device_room: DeviceRoom
    unlink_queue: UnlinkQueue

    @property
    def has_failed(self) -> bool:
        """Whether what it held is lost, and nothing is put there any more."""
        return bool(self.probe.why_failed)
