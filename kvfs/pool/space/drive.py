"""A drive of a pool: whether it answers, what is taken there, and what gives some back."""

from dataclasses import dataclass

from kvfs.core.headroom import Headroom
from kvfs.core.types import DeviceState, DriveNo, InodeNo
from kvfs.pool.space.device_probe import DeviceProbe
from kvfs.pool.space.space import DeviceRoom, Space
from kvfs.pool.space.unlink_queue import UnlinkQueue


@dataclass(eq=False)
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
    #: Whether nothing new is put there, and what is there goes: `kvfs drive drain`.
    is_draining: bool = False

    @property
    def state(self) -> DeviceState:
        """How it answers; if as it should, whether it is being emptied."""
        answers = self.probe.state
        drains = self.is_draining and answers is DeviceState.SERVING
        return DeviceState.DRAINING if drains else answers

    @property
    def has_failed(self) -> bool:
        """Whether what it held is lost, and nothing is put there any more."""
        return bool(self.probe.why_failed)

    @property
    def is_lacking(self) -> bool:
        """Whether the pool should have it, and goes on without."""
        return self.has_failed and not self.is_removed

    @property
    def is_removed(self) -> bool:
        """Whether it is no drive of the pool any more."""
        return self.probe.state is DeviceState.REMOVED
