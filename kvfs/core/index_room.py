"""How much of the index's map may hold rows: names need space there, whatever their blocks hold.

LMDB changes nothing in place, so in a full map even deletes fail (MDB_MAP_FULL in lmdb.h), and with
them eviction and the next start. So new rows are refused before that, and eviction begins even
earlier. On a full device the file has only preallocated space, and new rows leave a part of that.
"""

from collections.abc import Callable, Mapping
from typing import Final

from kvfs.core.errors import NoSpace
from kvfs.core.records import CHILD_PREFIX, NAME_PREFIX, XATTR_PREFIX

#: New rows leave this much free, both of the map and of the space allocated to the file. The
#: largest batch of an eviction changes some 150 pages of 4 KiB, and pages freed by the two
#: transactions before it cannot be used yet.
KEPT_BYTES: Final = 4 << 20
_KEPT_SHARE: Final = 1 / 16
_KEPT_MOST_SHARE: Final = 1 / 4
#: Share of the rows at which eviction begins.
_BINDING_SHARE: Final = 31 / 32
#: LMDB is asked once in this many commits; earlier if commits of the largest size (an attribute,
#: and pages) could use up what is left.
COMMITS_PER_LOOK: Final = 64
_COMMIT_MOST_BYTES: Final = 128 << 10


def mapped_bytes(map_bytes: int, used_bytes: int) -> int:
    """Return how much LMDB must map of a file in which it uses *used_bytes*.

    The limit is *map_bytes*. A larger file (the setting was larger, or a rebuild found more names)
    is mapped with space for deletes; otherwise nothing could be removed from it.
    """
    return max(map_bytes, used_bytes + _least_kept_bytes(map_bytes))


def _least_kept_bytes(map_bytes: int) -> int:
    return min(KEPT_BYTES, int(map_bytes * _KEPT_MOST_SHARE))


class IndexRoom:
    """Compares the rows with the map of *map_bytes*."""

    def __init__(
        self,
        map_bytes: int,
        rows_bytes: Callable[[], int],
        file_end_bytes: Callable[[], int] | None = None,
    ) -> None:
        """*rows_bytes* returns how much of the map holds rows.

        *file_end_bytes* returns how much rows may take of the space allocated to the file.
        """
        self._file_end_bytes = file_end_bytes
        self.map_bytes: Final = map_bytes
        self.rows_bytes: Final = rows_bytes
        kept_bytes = max(map_bytes * _KEPT_SHARE, _least_kept_bytes(map_bytes))
        self._growth_end_bytes = map_bytes - int(kept_bytes)
        self._eviction_begin_bytes = map_bytes - 2 * int(kept_bytes)
        #: Whether the last check found no space for a new name or attribute.
        self.crowded = False
        self.look()

    def note_commit(self) -> None:
        """Note that a transaction was committed."""
        self._commits_to_look -= 1
        if self._commits_to_look <= 0:
            self.look()

    def require(self, rows: Mapping[bytes, bytes | None]) -> None:
        """Raise NoSpace if *rows* (None: a removed one) add a name and there is no space."""
        if self.crowded and _grows(rows):
            self.look()
            if self.crowded:
                raise NoSpace("index: its map or the device takes no more names")

    def excess_names(self, names: int) -> int:
        """Return how many of all names (there are *names*) must go to make space for others."""
        rows_bytes = self.rows_bytes()
        excess_bytes = max(0, rows_bytes - self._eviction_begin_bytes)
        return -(-names * excess_bytes // max(1, rows_bytes))

    def binds(self) -> bool:
        """Whether blocks are evicted for names, which stops a page below where it begins."""
        return self.rows_bytes() > self._eviction_begin_bytes * _BINDING_SHARE

    def look(self) -> None:
        """Ask LMDB how much space is left."""
        end_bytes = self._growth_end_bytes
        if self._file_end_bytes is not None:
            end_bytes = min(end_bytes, self._file_end_bytes())
        left_bytes = end_bytes - self.rows_bytes()
        self.crowded = left_bytes <= 0
        self._commits_to_look = min(left_bytes // _COMMIT_MOST_BYTES, COMMITS_PER_LOOK)


def _grows(rows: Mapping[bytes, bytes | None]) -> bool:
    """Whether *rows* add more names or attributes than they take away.

    A name that now leads to another inode keeps its name row, and an inode that is renamed within
    its directory keeps its child row. Only something new adds both.
    """
    names = children = attributes = 0
    for key, value in rows.items():
        change = -1 if value is None else 1
        if key.startswith(NAME_PREFIX):
            names += change
        elif key.startswith(CHILD_PREFIX):
            children += change
        elif key.startswith(XATTR_PREFIX):
            attributes += change
    return min(names, children) > 0 or attributes > 0
