"""What one server of a mount leaves to the next: the supervisor holds it in between.

These are the open /dev/fuse, the pool with its claims, and five tables in shared memory: handles,
journal, notes, what is not durable, and evicted names. The kernel keeps the mount, so the next
server does not mount. ``fuse`` is handed to the supervisor last: no server takes over without it.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from kvfs.core.encryption import parse_encryption
from kvfs.core.errors import FormatUnknown, ServeFailed
from kvfs.core.settings import Settings
from kvfs.core.types import FIRST_DRIVE, DriveNo
from kvfs.devices import Device, DirectoryReserve, open_source
from kvfs.devices.device import Noted, inherit_device, noted_device
from kvfs.devices.pool_drives import bring_up_to_date, in_order
from kvfs.devices.stand_in import REMOVED, stand_in
from kvfs.machine.held_files import HeldFiles
from kvfs.storage.outliving import (
    FAILED_DRIVES,
    Notes,
    Outliving,
    empty_evicted,
    empty_undurable,
    undurable_rows_max,
)
from kvfs.storage.syscalls import Syscalls

_DEVICE_FILE: Final = "fuse"
_POOL: Final = "pool"
_CLAIM: Final = "claim-"
#: Before these two names, for a drive from 1 on.
_DRIVE: Final = "drive-{}-"
_HANDLES: Final = "handles"
_JOURNAL: Final = "journal"
_NOTES: Final = "notes"
_UNDURABLE: Final = "undurable"
_EVICTED: Final = "evicted"
_ABORT_FILE: Final = "abort"
_DEVICE_NOTE: Final = b"device"
#: Those of the drives from 1 on, by number.
_MORE_NOTE: Final = b"more devices"


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
        """The table of notes."""
        return self.outliving.notes

    @property
    def may_be_followed(self) -> bool:
        """Whether the next server can go on with what this one leaves."""
        return self.takes_over or self.notes.get(_DEVICE_NOTE) is not None

    @property
    def takes_over(self) -> bool:
        """Whether another server has served this mount."""
        return self.device is not None


def begin(
    held: HeldFiles, settings: Settings, remark: Callable[[str], None]
) -> tuple[Succession, Device]:
    """Take over what the last server left, or else open the pool. Raises CommandError.

    *remark* takes a line for each drive that is missing.
    """
    if held.given:
        of = _take_over(held, settings)
        assert of.device is not None, "it was left"
        device = of.device
    else:
        of, device = _open(settings)
    for missing in device.lacking:
        number, uuid = missing.header.drive, missing.uuid
        remark(
            f"drive {number} (UUID {uuid}) is missing: {missing.why_missing}; its blocks are "
            "misses. Mount again with it, and it gets new ones"
        )
    return of, device


def _open(settings: Settings) -> tuple[Succession, Device]:
    """Open the pool for a first server. Raises CommandError."""
    device = open_source(
        settings.source,
        read_only=settings.read_only,
        capacity_bytes=settings.capacity_bytes,
        reserve=DirectoryReserve(
            settings.directory_reserve_share, settings.directory_reserve_bytes
        ),
        all_drives=settings.all_drives,
        encryption=parse_encryption(settings.encrypt),
    )
    try:
        return _tables(settings), device
    except BaseException:
        device.close()
        raise


def _tables(settings: Settings) -> Succession:
    """Make the tables that a first server will leave to the next. Raises OSError."""
    handles_fd = os.memfd_create("kvfs-handles", os.MFD_CLOEXEC)
    outliving = Outliving.fresh(undurable_rows_max(settings))
    return Succession(outliving, handles_fd, -1, -1, None)


def _take_over(held: HeldFiles, settings: Settings) -> Succession:
    """Take what the last server left. Raises FormatUnknown, ServeFailed, SourceForeign."""
    given = held.given
    for name in (_DEVICE_FILE, _HANDLES, _JOURNAL, _NOTES):
        if name not in given:
            raise ServeFailed(f"the supervisor does not hold {name}: nobody can take over")
    outliving = _outliving(held, settings)
    note = outliving.notes.get(_DEVICE_NOTE)
    if note is None:
        raise ServeFailed("the last server left no note of its device: nobody can take over")
    notes = (note, *(outliving.notes.get(_MORE_NOTE) or ()))
    first, *others = _drives(held, notes, outliving.notes.get(FAILED_DRIVES) or {})
    first.take_in(others, settings.capacity_bytes)
    if not settings.read_only:
        bring_up_to_date(first)
    _let_go(held, len(first.drives))
    return Succession(
        outliving, given[_HANDLES], given[_DEVICE_FILE], given.get(_ABORT_FILE, -1), first
    )


def _drives(held: HeldFiles, notes: Sequence[Noted], failed: Mapping[int, str]) -> list[Device]:
    """Return the drives that the last server left, by number, of which it noted *notes*.

    It found that some have *failed*, and why. One that failed or was missing has a stand-in. What
    the supervisor holds of one that failed stays open as long as the mount, as clients may have its
    files open; nobody holds any more what was removed. Raises ServeFailed, SourceForeign,
    SourceDamaged.
    """
    if not notes[1:]:
        if _POOL not in held.given:
            raise ServeFailed(f"the supervisor does not hold {_POOL}: nobody can take over")
        return [_inherited(held.given, FIRST_DRIVE, notes[0])]
    found, why = list[Device](), dict[DriveNo, str]()
    for drive, note in ((DriveNo(number), note) for number, note in enumerate(notes)):
        if why_not := failed.get(drive) or _why_unusable(held.given, drive):
            why[drive] = why_not
        else:
            found.append(_inherited(held.given, drive, note))
    if not found:
        raise ServeFailed(f"nobody can take over: drive {FIRST_DRIVE}: {why[FIRST_DRIVE]}")
    found = in_order(found)
    other = found[0]
    why |= dict.fromkeys(map(DriveNo, other.header.membership.removed), REMOVED)
    there = {one.header.drive: one for one in found if one.header.drive not in why}
    for drive, reason in why.items():
        if reason == REMOVED:
            _let_go(held, drive)
        source = "" if reason == REMOVED else notes[drive][1]
        there[drive] = stand_in(other, drive, reason, source=source)
    return [there[drive] for drive in sorted(there)]


def _why_unusable(given: Mapping[str, int], drive: DriveNo) -> str:
    """Return why a server can not go on with *drive*, or ""."""
    pool_fd = given.get(f"{_prefix(drive)}{_POOL}")
    if pool_fd is None:
        return "it was missing when the pool was mounted"
    try:
        Syscalls().check_alive(pool_fd)
    except OSError as error:
        return f"its file system has failed: {error.strerror}"
    return ""


def _inherited(given: Mapping[str, int], drive: DriveNo, note: Noted) -> Device:
    """Return a drive that the last server left. Raises SourceForeign, FormatUnknown."""
    claim = f"{_prefix(drive)}{_CLAIM}"
    claims = [fd for name, fd in sorted(given.items()) if name.startswith(claim)]
    return inherit_device(note, given[f"{_prefix(drive)}{_POOL}"], claims)


def _prefix(drive: int) -> str:
    """Return what the names of *drive*'s files begin with, as the supervisor holds them."""
    return _DRIVE.format(drive) if drive != FIRST_DRIVE else ""


def _let_go(held: HeldFiles, drive: int) -> None:
    """Close what the supervisor holds of *drive*, which the pool does not have, in a thread.

    It was removed; or the last server was killed while it was added, and there is no note of it.
    The last close unmounts it, which waits until all is written there.
    """
    prefixes = tuple(f"{_prefix(drive)}{kind}" for kind in (_POOL, _CLAIM))
    names = [name for name in held.given if name.startswith(prefixes)]
    for name in names:
        held.drop(name)
    fds = [held.given.pop(name) for name in names]

    def close() -> None:
        for fd in fds:
            os.close(fd)

    threading.Thread(target=close, name="kvfs-let-go", daemon=True).start()


def _outliving(held: HeldFiles, settings: Settings) -> Outliving:
    """Return what the last server left in memory. Raises FormatUnknown.

    Another version may have no table of what is not durable, or one of another layout. An empty one
    takes its place: a search of the index fills it, and whatever waits for all to be durable waits
    for that search (engine/durability/durable_pass.py).
    """
    given, rows_max = held.given, undurable_rows_max(settings)
    journal_fd, notes_fd = given[_JOURNAL], given[_NOTES]
    if (evicted_fd := given.get(_EVICTED, -1)) < 0:
        held.hold(_EVICTED, evicted_fd := empty_evicted())
    if _UNDURABLE in given:
        with contextlib.suppress(FormatUnknown):
            return Outliving.at(journal_fd, notes_fd, given[_UNDURABLE], evicted_fd, rows_max)
        os.close(given[_UNDURABLE])
    empty_fd = empty_undurable()
    held.hold(_UNDURABLE, empty_fd)
    return Outliving.at(journal_fd, notes_fd, empty_fd, evicted_fd, rows_max)


def leave(held: HeldFiles, of: Succession, device: Device, fuse_fd: int) -> None:
    """Give the supervisor what the next server needs."""
    of.notes.put(_DEVICE_NOTE, noted_device(device))
    if device.more:
        of.notes.put(_MORE_NOTE, tuple(map(noted_device, device.more)))
    for drive, one in enumerate(device.drives):
        if not one.why_missing:  # the next server makes a stand-in of its own
            _hold(held, drive, one)
    held.hold(_HANDLES, of.handles_fd)
    held.hold(_JOURNAL, of.outliving.journal_fd)
    held.hold(_NOTES, of.outliving.notes_fd)
    held.hold(_UNDURABLE, of.outliving.undurable_fd)
    held.hold(_EVICTED, of.outliving.evicted_fd)
    held.hold(_DEVICE_FILE, fuse_fd)


def leave_one_more(held: HeldFiles, notes: Notes, device: Device, more: Device) -> None:
    """Give the supervisor one *more* drive of *device*'s pool, which the next server is to have.

    Raises ServeFailed, with nothing left, if it does not take it.
    """
    if not _hold(held, len(device.drives), more):
        raise ServeFailed("there is no supervisor any more: mount again")
    # Only now: a note of a drive that nobody holds would keep the next server from starting.
    notes.put(_MORE_NOTE, tuple(map(noted_device, (*device.more, more))))


def _hold(held: HeldFiles, drive: int, one: Device) -> bool:
    """Have the files of *drive* held; whether the supervisor takes them."""
    for number, fd in enumerate(one.held_fds):
        held.hold(f"{_prefix(drive)}{_CLAIM}{number}", fd)
    return held.hold(f"{_prefix(drive)}{_POOL}", one.pool_fd)
