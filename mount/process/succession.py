"""What one server of a mount leaves to the next: the supervisor holds it in between.

It is the open /dev/fuse, the pool with its claims, and three tables in shared memory: handles,
journal, notes. The kernel goes on with the mount, so the next server does not mount, and the last
thing that is held is ``fuse``: without it nobody can go on.
"""

import os
from typing import Final, NamedTuple

from kvfs.core.errors import ServeFailed
from kvfs.core.settings import Settings
from kvfs.devices import Device, Reserve, open_source
from kvfs.devices.inherited import inherit_device, noted_device
from kvfs.machine.held_files import HeldFiles
from kvfs.storage.notes import Notes
from kvfs.storage.outliving import Outliving

_DEVICE_FILE: Final = "fuse"
_POOL: Final = "pool"
_CLAIM: Final = "claim-"
_HANDLES: Final = "handles"
_JOURNAL: Final = "journal"
_NOTES: Final = "notes"
_ABORT_FILE: Final = "abort"
_DEVICE_NOTE: Final = b"device"


class Succession(NamedTuple):
    """The open files of one mount that outlive a server."""

    outliving: Outliving
    handles_fd: int
    #: -1 before there is one.
    fuse_fd: int
    abort_fd: int
    device: Device | None

    @property
    def notes(self) -> Notes:
        """What is noted in words."""
        return self.outliving.notes

    @property
    def takes_over(self) -> bool:
        """Whether another server has served this mount."""
        return self.device is not None


def begin(held: HeldFiles, settings: Settings) -> tuple[Succession, Device]:
    """Take over what the last server left, or open the pool as a first one. Raises CommandError."""
    if held.given:
        of = _take_over(held, settings)
        assert of.device is not None, "it was left"
        return of, of.device
    device = open_source(
        settings.source,
        read_only=settings.read_only,
        capacity_bytes=settings.capacity_bytes,
        reserve=Reserve(settings.directory_reserve_share, settings.directory_reserve_bytes),
    )
    try:
        return _begin(), device
    except BaseException:
        device.close()
        raise


def _begin() -> Succession:
    """Make what a first server leaves to others. Raises OSError."""
    handles_fd = os.memfd_create("kvfs-handles", os.MFD_CLOEXEC)
    return Succession(Outliving.fresh(), handles_fd, -1, -1, None)


def _take_over(held: HeldFiles, settings: Settings) -> Succession:
    """Take what the last server left. Raises FormatUnknown, ServeFailed, SourceForeign."""
    given = held.given
    for name in (_DEVICE_FILE, _POOL, _HANDLES, _JOURNAL, _NOTES):
        if name not in given:
            raise ServeFailed(f"the supervisor does not hold {name}: nobody can take over")
    outliving = Outliving.at(given[_JOURNAL], given[_NOTES])
    note = outliving.notes.get(_DEVICE_NOTE)
    if note is None:
        raise ServeFailed("the last server left no note of its device: nobody can take over")
    claims = [fd for name, fd in sorted(given.items()) if name.startswith(_CLAIM)]
    device = inherit_device(note, given[_POOL], claims, settings.capacity_bytes)
    return Succession(
        outliving, given[_HANDLES], given[_DEVICE_FILE], given.get(_ABORT_FILE, -1), device
    )


def leave(held: HeldFiles, of: Succession, device: Device, fuse_fd: int) -> None:
    """Let the supervisor hold what the next server needs."""
    of.notes.put(_DEVICE_NOTE, noted_device(device))
    for number, fd in enumerate(device.held_fds):
        held.hold(f"{_CLAIM}{number}", fd)
    held.hold(_POOL, device.pool_fd)
    held.hold(_HANDLES, of.handles_fd)
    held.hold(_JOURNAL, of.outliving.journal_fd)
    held.hold(_NOTES, of.outliving.notes_fd)
    held.hold(_DEVICE_FILE, fuse_fd)
