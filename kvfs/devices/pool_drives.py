"""Which sources make a pool of several drives: whether they are of one, and where its others are.

The header of each drive lists the UUIDs of all. That of a drive is the UUID of its XFS, so a device
that was not named can be found as any other file system is (blkid(8)); an image file can not.
"""

import os
import stat
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from kvfs.core.errors import CommandError, SourceBusy, SourceMissing, UsageError
from kvfs.core.types import FIRST_DRIVE, DriveNo
from kvfs.devices.by_uuid import device_with
from kvfs.devices.device import Device, SourceKind
from kvfs.devices.pool_files import PoolHeader, read_header, write_errors, write_header

#: Each has three open files that outlive a server (machine/held_files.py).
SERVED_DRIVES_MAX: Final = 64
_SHOWN: Final = 3


def refuse_unlike(sources: Sequence[str], kinds: Sequence[SourceKind]) -> None:
    """Raise UsageError unless *sources* can be the drives of one new pool.

    They must be different ones. Directories go with directories alone, each on a file system of its
    own: two on one would both count its space.
    """
    if len(sources) > SERVED_DRIVES_MAX:
        raise UsageError(
            f"{len(sources)} drives are too many; a pool has at most {SERVED_DRIVES_MAX}"
        )
    seen: dict[object, str] = {}
    for source, kind in zip(sources, kinds, strict=True):
        if (kind == "directory") != (kinds[FIRST_DRIVE] == "directory"):
            raise UsageError(
                f"{source} is a {kind} and {sources[FIRST_DRIVE]} is a {kinds[FIRST_DRIVE]}: a "
                "pool has either directories or drives and image files"
            )
        place = _place_of(source, kind)
        other = seen.get(place)
        if other is None:
            seen[place] = source
            continue
        if kind == "directory" and not os.path.samefile(source, other):
            raise UsageError(f"{source} and {other} lie on one file system; give one of them")
        raise _twice(source, other)


def refuse_twice(sources: Sequence[str]) -> None:
    """Raise UsageError if one of *sources* is named twice."""
    seen: dict[str, str] = {}
    for source in sources:
        place = os.path.realpath(source)
        if place in seen:
            raise _twice(source, seen[place])
        seen[place] = source


def _twice(source: str, other: str) -> UsageError:
    return UsageError(f"{source} is given twice" + (f", as {other}" if other != source else ""))


def _place_of(source: str, kind: SourceKind) -> object:
    """Return what two sources that take the same space have in common."""
    try:
        status = os.stat(source)
    except FileNotFoundError:  # an image that is to be created
        return os.path.realpath(source)
    if kind == "directory":
        return status.st_dev
    return status.st_rdev if stat.S_ISBLK(status.st_mode) else (status.st_dev, status.st_ino)


def in_order(devices: Sequence[Device]) -> list[Device]:
    """Return *devices*, of one pool, by the numbers of their drives.

    If a drive was added or removed and not all know it, they do from now on, in memory. Raises
    UsageError if they are not of one, or one drive is there twice; SourceBusy for a copy.
    """
    first, found = devices[0], dict[int, Device]()
    for device in devices:
        refuse_other_pool((first.source, device.source), (first.header, device.header))
        drive = device.header.drive
        if (other := found.setdefault(drive, device)) is not device:
            raise SourceBusy(f"{device.source} is a copy of {other.source}, drive {drive}")
        if (device.kind == "directory") != (first.kind == "directory") or (
            device.fs_type != first.fs_type
        ):
            raise UsageError(
                f"{device.source} is on {device.fs_type} ({device.kind}), and {first.source} on "
                f"{first.fs_type} ({first.kind}): the drives of a pool are alike"
            )
    drives = max((one.header.membership.drives for one in devices), key=len)
    gone = {drive for one in devices for drive in one.header.membership.removed}
    for device in devices if drives[1:] else ():
        several = device.header.membership._replace(drives=drives, removed=tuple(sorted(gone)))
        device.header = device.header._replace(several=several)
    return [found[drive] for drive in sorted(found)]


def without_removed(found: Sequence[Device], named: Sequence[str]) -> list[Device]:
    """Return those *found*, the drives of a pool, that were not removed; close the others.

    Raises UsageError if one of those is among the sources that were *named*.
    """
    for device in [one for one in found if one.header.is_removed]:
        if device.source in named:
            raise UsageError(
                f"{device.source} was removed from its pool, as drive {device.header.drive}: leave "
                "it out; `kvfs destroy` makes it blank"
            )
        device.close()
    return [device for device in found if not device.header.is_removed]


def bring_up_to_date(first: Device) -> None:
    """Have the header of each drive say what ``in_order`` found. Raises SourceDamaged, SourceFull.

    Each is written whole or not at all. The longest list of any drive is the pool's, and what one
    says is removed is, so that it does not matter after which of them this ends.
    """
    there = [drive for drive in first.drives if not drive.why_missing]
    for drive in there if first.header.several is not None else ():
        if read_header(drive.pool_fd, drive.source) != drive.header:
            with write_errors(drive.source):
                write_header(drive.pool_fd, drive.header)


def note_removed(drives: Sequence[Device], gone: Device) -> None:
    """Have *drives* of a pool, and *gone* itself, say that *gone* is none of it any more.

    The first that says so decides: all others learn of it at the next start (``in_order``). *gone*
    is the last, as what it alone says is not known where it is not named. Raises OSError if none of
    *drives* can be written.
    """
    number = gone.header.drive
    failures = [error for drive in drives if (error := _say_removed(drive, number)) is not None]
    if len(failures) == len(drives):
        raise failures[0]
    _say_removed(gone, number)


def _say_removed(drive: Device, number: DriveNo) -> OSError | None:
    """Have the header of *drive* say that the one with *number* was removed, or return why not."""
    several = drive.header.membership
    removed = tuple(sorted({*several.removed, number}))
    header = drive.header._replace(several=several._replace(removed=removed))
    try:
        write_header(drive.pool_fd, header)
    except OSError as error:
        return error
    drive.header = header
    return None


def refuse_other_pool(sources: tuple[str, str], headers: tuple[PoolHeader, PoolHeader]) -> None:
    """Raise UsageError unless the two *sources*, which may be the same, are of one pool.

    Drives are added at the end of its list, which not all of them may have been told.
    """
    one, other = (header.membership for header in headers)
    if sources[0] == sources[1] and one == other:
        return
    before, after = sorted((one.drives, other.drives), key=len)
    if (one.pool, after[: len(before)]) == (other.pool, before) and after[1:]:
        return
    alone = [at for at, header in zip(sources, headers, strict=True) if header.several is None]
    if alone:
        raise UsageError(f"{alone[0]} is a pool of one drive")
    raise UsageError(f"{sources[1]} is of another pool than {sources[0]}")


def others_of(given: Sequence[PoolHeader]) -> dict[DriveNo, str]:
    """Return the drives that a pool has beside those with the headers *given*, and where each is.

    "": it was not found. Raises ToolMissing, SourceDamaged.
    """
    several = given[0].membership
    known = {*(header.drive for header in given), *several.removed}
    drives = enumerate(several.drives)
    return {DriveNo(at): device_with(uuid) for at, uuid in drives if at not in known}


class Unusable(NamedTuple):
    """Sources that could not be opened, and why: they may be drives that a pool lacks."""

    found: dict[str, CommandError]

    def why(self, drives: Sequence[DriveNo]) -> dict[DriveNo, tuple[str, str]]:
        """Return the source of each of *drives*, which are missing, and why it is missing.

        Nothing of a source that cannot be opened tells which drive it is. So it is known if one is
        missing. Raises what kept a source from being opened that is none of the drives.
        """
        if len(self.found) > len(drives):
            raise next(iter(self.found.values()))
        reasons = "; ".join(error.found for error in self.found.values())
        reasons = reasons or "no device has this UUID"
        source = next(iter(self.found)) if len(drives) == len(self.found) == 1 else ""
        return dict.fromkeys(drives, (source, reasons))


def refuse_missing(first: Device, why: Mapping[DriveNo, tuple[str, str]]) -> None:
    """Raise SourceMissing: *first*'s pool lacks the drives that *why* has the reasons for."""
    several = first.header.several
    assert several is not None, "a pool of one drive lacks none"
    missing = [f"drive {at} (UUID {several.drives[at]})" for at in why]
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    reason = next(reason for _, reason in why.values())
    raise SourceMissing(
        f"{first.source} is drive {several.drive} of a pool of {len(several.drives)}, and "
        f"{', '.join(missing[:_SHOWN])}{more} cannot be found: {reason}",
        "name the sources of all its drives",
    )


def refuse_part(sources: Sequence[str], headers: Sequence[PoolHeader | None]) -> None:
    """Raise UsageError unless *sources* are all drives of one pool. None: its header is damaged."""
    known = [(at, header) for at, header in zip(sources, headers, strict=True) if header]
    if not known:
        return
    first_source, first = known[0]
    for source, header in known:
        refuse_other_pool((first_source, source), (first, header))
    gone = {drive for _, header in known for drive in header.membership.removed}
    whole = max(len(header.membership.drives) for _, header in known) - len(gone)
    named = len(sources) - sum(header.drive in gone for _, header in known)
    if 0 < named < whole:
        raise UsageError(
            f"{first_source} is drive {first.drive} of a pool of {whole}: name all of them; `kvfs "
            "drive remove` takes one out of a pool that is mounted, and `kvfs mkfs --force` makes "
            "a new pool of one whose others are lost"
        )
