"""SOURCE of a pool as one text: a source, or those of all its drives with commas between. Pure.

A comma separates only before a slash, since paths are absolute in such a list: so no name of a file
or of a device is cut. The mount table shows a mount's sources so, and whoever reads it there may
give them back in one word.
"""

import re
from collections.abc import Iterable

_BETWEEN = re.compile(",(?=/)")


def sources_of(source: str) -> tuple[str, ...]:
    """Return the sources that *source* lists; it is the only one if it is no list."""
    return tuple(_BETWEEN.split(source))


def listed(sources: Iterable[str]) -> str:
    """Return *sources* as one text. ``sources_of`` finds them again if they are absolute paths."""
    return ",".join(sources)
