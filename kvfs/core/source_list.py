"""SOURCE of a pool as one text: a source, or those of all its drives with commas between. Pure.

A source is a path, or ``UUID=`` and the UUID of a pool or drive, as in fstab(5). A comma separates
only before a slash or a UUID, since paths are absolute in such a list: so no name of a file or of a
device is cut. The mount table shows a mount's sources so, and whoever reads it there may give them
back in one word.
"""

import re
from collections.abc import Iterable
from typing import Final

_BY_UUID: Final = "UUID="
_BETWEEN: Final = re.compile(f",(?=/|{_BY_UUID})")


def sources_of(source: str) -> tuple[str, ...]:
    """Return the sources that *source* lists; it is the only one if it is no list."""
    return tuple(_BETWEEN.split(source))


def listed(sources: Iterable[str]) -> str:
    """Return *sources* as one text. ``sources_of`` finds them again if they are absolute paths."""
    return ",".join(sources)


def is_by_uuid(source: str) -> bool:
    """Whether *source* is the UUID of what it means, and no path."""
    return source.startswith(_BY_UUID)


def uuid_in(source: str) -> str:
    """Return the UUID in *source*, for which ``is_by_uuid``; blkid(8) shows it in small letters."""
    return source.removeprefix(_BY_UUID).strip("\"'").lower()


def by_uuid(uuid: str) -> str:
    """Return the source that means the pool or drive with *uuid*."""
    return f"{_BY_UUID}{uuid}"
