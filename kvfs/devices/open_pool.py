"""Opens the drives of a pool, in any order, and goes on without some that are missing."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NoReturn

from kvfs.core.encryption import Encryption
from kvfs.core.errors import (
    SourceBlank,
    SourceBusy,
    SourceDamaged,
    SourceMissing,
    UsageError,
)
from kvfs.core.source_list import sources_of
from kvfs.core.types import DriveNo
from kvfs.devices import block, directory, image
from kvfs.devices.by_uuid import located_some
from kvfs.devices.device import Device, DirectoryReserve, SourceKind
from kvfs.devices.pool_drives import (
    Unusable,
    bring_up_to_date,
    in_order,
    others_of,
    refuse_missing,
    refuse_twice,
    without_removed,
)
from kvfs.devices.pool_files import write_errors
from kvfs.devices.released import kind_to_be, wait_released
from kvfs.devices.source import RESERVE
from kvfs.devices.stand_in import REMOVED, stand_in
from kvfs.devices.unlocked import require_encryptable, unlocked
from kvfs.devices.xfs import FailedButHeld, LeftMeanwhile
from kvfs.devices.xfs_tools import forget_cut_off
from kvfs.storage.pool_run import distrust_index, read_pool_run
from kvfs.storage.syscalls import Syscalls

_OPENS: Final = {"block": block.open_block, "image": image.open_image}
#: How often the file system of a dead mount may end just before it is joined.
_JOINS_MAX: Final = 3


def open_source(
    source: str,
    *,
    read_only: bool = False,
    capacity_bytes: int | None = None,
    reserve: DirectoryReserve = RESERVE,
    all_drives: bool = False,
    encryption: Encryption | None = None,
) -> Device:
    """Open the pool on *source*, which may list several drives, until the device's ``close``.

    Raises what open_drives raises.
    """
    return open_drives(
        sources_of(source),
        read_only=read_only,
        capacity_bytes=capacity_bytes,
        reserve=reserve,
        all_drives=all_drives,
        encryption=encryption,
    )


def open_drives(
    sources: Sequence[str],
    *,
    read_only: bool = False,
    capacity_bytes: int | None = None,
    reserve: DirectoryReserve = RESERVE,
    all_drives: bool = False,
    encryption: Encryption | None = None,
) -> Device:
    """Open the pool on *sources*, drives of one in any order, and hold it until ``close``.

    A source may be given by its UUID, and those of its drives that are not given are found by
    theirs. Returns the first drive; the others close with it. One that was removed, cannot be found
    or opened has a stand-in (stand_in.py), unless *all_drives* are wanted.
    *capacity_bytes* overrides what the pool was made with. Raises SourceBlank if all are blank
    (kvfs mount then formats them, or creates the images), SourceMissing, SourceForeign,
    FormatUnknown, SourceBusy, SourceDamaged, UsageError, ToolMissing, NotRoot, KeyUnusable; in that
    case nothing in the sources has changed.
    """

    sources, missing_uuids = located_some(sources)
    refuse_twice(sources)

    def opened(source: str) -> Device:
        kind = kind_to_be(source, may_create=capacity_bytes is not None)
        return _open(source, kind, encryption, read_only=read_only, reserve=reserve)

    unusable = Unusable(missing_uuids)
    with contextlib.ExitStack() as stack:
        found = in_order([stack.enter_context(one) for one in _open_all(sources, opened, unusable)])
        found = without_removed(found, sources)
        if found[0].header.several is None and unusable.found:
            _refuse_mixed(found[0].source, unusable)
        missing: list[DriveNo] = []
        for drive, at in others_of([each.header for each in found]).items():
            other = _open_if_usable(at, opened, unusable) if at else None
            if other is None:
                missing.append(drive)
            else:
                found.append(stack.enter_context(other))
        found = without_removed(in_order(found), sources)
        one, gone = found[0], found[0].header.membership.removed
        why = unusable.why([drive for drive in missing if drive not in gone])
        if why and all_drives:
            refuse_missing(one, why)
        why |= {DriveNo(drive): ("", REMOVED) for drive in gone}
        for drive, (source, reason) in sorted(why.items()):
            stands_in = stand_in(one, drive, reason, source=source)
            found.insert(drive, stack.enter_context(stands_in))
        first, *others = found
        first.take_in(others, capacity_bytes)
        if not read_only:
            bring_up_to_date(first)
        _distrust_if_cut_off(first)
        stack.pop_all()
        return first


def open_one_more(
    source: str,
    *,
    reserve: DirectoryReserve = RESERVE,
    encryption: Encryption | None = None,
) -> Device:
    """Open the one drive *source*, for a pool that it joins. Raises what open_drives raises."""
    kind = kind_to_be(source, may_create=False)
    return _open(source, kind, encryption, read_only=False, reserve=reserve)


def _open_if_usable(
    source: str, opened: Callable[[str], Device], unusable: Unusable
) -> Device | None:
    """Return the drive on *source*; None, and a reason in *unusable*, if it may be missing."""
    try:
        return opened(source)
    except (SourceBlank, SourceMissing, SourceDamaged) as error:
        unusable.found[source] = error
        return None


def _open_all(
    sources: Sequence[str], opened: Callable[[str], Device], unusable: Unusable
) -> Iterator[Device]:
    """Yield the device of each source that can be opened. Raises SourceBlank if all are blank.

    Raises what keeps one from being opened if none can.
    """
    is_any = False
    for source in sources:
        if (device := _open_if_usable(source, opened, unusable)) is not None:
            is_any = True
            yield device
    if not is_any:
        errors = list(unusable.found.values())
        raise next((each for each in errors if not isinstance(each, SourceBlank)), errors[0])


def _refuse_mixed(pool: str, unusable: Unusable) -> NoReturn:
    """Raise why a source cannot be one of the drives of a pool of one, which is on *pool*."""
    source, error = next(iter(unusable.found.items()))
    if isinstance(error, SourceBlank):
        raise UsageError(
            f"{source} is blank and {pool} is not: give the drives of one pool, or blank ones alone"
        )
    raise error


def _distrust_if_cut_off(first: Device) -> None:
    """Have the index of a pool of several drives distrusted if one of them was cut off.

    An earlier start may have found it, and ended before it could say so: then it is noted.
    """
    lost = next((one for one in first.there if one.cut_off), None)
    if lost is None or not first.more:
        return
    syscalls = Syscalls()
    if not first.read_only:
        with write_errors(first.sources):
            distrust_index(first.run_places, syscalls)
        forget_cut_off(first.epoch)
    elif not read_pool_run(first.run_places, syscalls).clean:
        raise SourceDamaged(
            f"{lost.source} was cut off, and its pool was not stopped cleanly: mount it writable "
            "once"
        )


def _open(
    source: str,
    kind: SourceKind,
    encryption: Encryption | None,
    *,
    read_only: bool,
    reserve: DirectoryReserve,
) -> Device:
    """Open one drive; raises what open_source raises."""
    if not os.path.exists(source):
        raise SourceBlank(f"{source} does not exist yet", "kvfs mkfs makes an image file of it")
    if kind == "directory":
        require_encryptable(source, kind, encryption)
        return directory.open_directory(source, read_only=read_only, reserve=reserve)
    for _ in range(_JOINS_MAX):
        try:
            with unlocked(source, kind, encryption) as mapping:
                if mapping is None:
                    return _OPENS[kind](source, read_only=read_only)
                return block.open_block(mapping.path, read_only=read_only, source=source, kind=kind)
        except LeftMeanwhile:
            wait_released(source, joins=True)
        except FailedButHeld as failed:
            try:
                wait_released(source)
            except SourceBusy:
                raise failed from None
    raise SourceBusy(f"{source} was in use until just now; try again")
