"""Which device a UUID means: that of a drive's XFS, which for drive 0 is the UUID of its pool.

An image file is not found so, unless it has a loop device: nothing lists files.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Final

from kvfs.core.errors import CommandError, SourceMissing
from kvfs.core.source_list import by_uuid, is_by_uuid, uuid_in
from kvfs.devices.busy import holders_of, kernel_name
from kvfs.devices.mapped import encrypted_below
from kvfs.devices.probe import tagged

_SHOWN: Final = 3


def located(sources: Iterable[str]) -> tuple[str, ...]:
    """Return *sources* with the device in place of each ``UUID=...``.

    Raises SourceMissing if no device has that UUID, or more than one: a copy is not the pool.
    ToolMissing, SourceDamaged.
    """
    return tuple(_located(each) if is_by_uuid(each) else each for each in sources)


def located_some(sources: Sequence[str]) -> tuple[tuple[str, ...], dict[str, CommandError]]:
    """Return what ``located`` does, but only of *sources* that are there; and why others are not.

    Raises what ``located`` raises if none is.
    """
    found, missing = list[str](), dict[str, CommandError]()
    for each in sources:
        try:
            found += located([each])
        except SourceMissing as error:
            if device_with(uuid_in(each)):
                raise  # there are copies
            missing[each] = error
    if missing and not found:
        raise next(iter(missing.values()))
    return tuple(found), missing


def _located(source: str) -> str:
    uuid = uuid_in(source)
    found = _devices_with(uuid) if uuid else []
    if not found:
        raise SourceMissing(
            f"{source}: no device here has this UUID",
            "blkid shows the UUIDs; name an image file or a directory by its path",
        )
    if len(found) > 1:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise SourceMissing(
            f"{source}: {', '.join(found[:_SHOWN])}{more} have this UUID: they are copies",
            "name the one that is meant",
        )
    return found[0]


def device_with(uuid: str) -> str:
    """Return the path of a device whose file system has *uuid*; "" if none has.

    Raises ToolMissing, SourceDamaged.
    """
    return next(iter(_devices_with(uuid)), "")


def _devices_with(uuid: str) -> Sequence[str]:
    """Return the devices with *uuid*; of those that lie on each other, the one that is a source.

    That is the device below a mapping of kvfs's own, as kvfs opens that itself; and else the upper
    one: what lies below a RAID or a multipath is only a part of it, or a way to it.
    """
    found = {}
    for path in tagged(by_uuid(uuid)):
        below = encrypted_below(path) or path
        found[os.path.realpath(below)] = below
    names = {kernel_name(path) for path in found}
    return [path for real, path in found.items() if not _lies_below(real, names)]


def _lies_below(path: str, names: set[str]) -> bool:
    """Whether one of the devices *names* lies on *path*."""
    return not names.isdisjoint(holders_of(path))
