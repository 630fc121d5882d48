"""The life of a block: its states, as the index stores them.

Pure. READY extents are in no index; GONE blocks have left it. Directories, symlinks and special
files are NODE: they have no bytes and no life of their own.
"""

from enum import IntEnum


class State(IntEnum):
    """Where a block is in its life; the numbers are part of the format (docs/format.md)."""

    NODE = 0
    DRAFT = 1
    PUBLISHED = 2
    SLAB = 3
    #: Published before and open for writing again: the extent is the truth until the last close.
    REWRITE = 4
