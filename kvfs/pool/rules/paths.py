"""Paths below the mountpoint, from the index, with bounds on length, steps and memory.

A client may nest directories to any depth, by creating each relative to a handle. A path longer
than PATH_MAX_BYTES fits into no system call, so only its end is of use.
"""

from collections.abc import Callable, Iterator
from typing import Final

from kvfs.core.errors import Damaged
from kvfs.core.inode_rules import Ascent
from kvfs.core.types import PATH_MAX_BYTES, ROOT_INODE, InodeNo, InodeRecord
from kvfs.storage.index import Index

#: Stands for the directories that are left out of a path that is too long.
CUT: Final = b"..."
#: Paths that ``Paths`` remembers: some ten thousand of usual length.
_KNOWN_MAX_BYTES: Final = 1 << 20
#: Memory that a remembered path takes beside its bytes.
_EACH_BYTES: Final = 128


def path_of(index: Index, ino: InodeNo) -> str:
    """Return the path of *ino* below the mountpoint, ``/`` for the root.

    If a directory on the way is damaged, only the part below it. If the path has PATH_MAX_BYTES or
    more, ``CUT`` and its end.
    """
    return cut(b"/" + b"/".join(reversed(list(_names(index, ino))))).decode(
        errors="surrogateescape"
    )


def cut(path: bytes) -> bytes:
    """Return *path* if it fits into a call, else ``CUT`` and as many of its last names as fit."""
    if len(path) < PATH_MAX_BYTES:
        return path
    end = path[len(CUT) + 1 - PATH_MAX_BYTES :]
    return CUT + end[end.index(b"/") :]


def _names(index: Index, ino: InodeNo) -> Iterator[bytes]:
    """Yield the names of *ino* and of the directories above it, as many as ``cut`` can use."""
    length = 0
    while (
        ino != ROOT_INODE
        and length < PATH_MAX_BYTES
        and (record := index.inode_or_miss(ino)) is not None
    ):
        yield record.name
        length += 1 + len(record.name)
        ino = record.parent


class Paths:
    """The paths of directories; a bounded number of them is remembered."""

    def __init__(self, index: Index) -> None:
        self._index: Final = index
        self._known: dict[InodeNo, bytes] = {}
        self._known_bytes = 0

    def of(self, directory: InodeNo) -> tuple[bytes, int]:
        """Return the path as ``path_of`` does, and how many rows of the index were read for it."""
        path = self._known.get(directory)
        if path is not None:
            return path, 0
        names = list(_names(self._index, directory))
        path = cut(b"/" + b"/".join(reversed(names)))
        self._known_bytes += len(path) + _EACH_BYTES
        if self._known_bytes > _KNOWN_MAX_BYTES:
            self.clear()
            self._known_bytes = len(path) + _EACH_BYTES
        self._known[directory] = path
        return path, len(names)

    def clear(self) -> None:
        """Forget all paths, because a directory moved."""
        self._known.clear()
        self._known_bytes = 0


def reaches(
    index: Index,
    directory: InodeNo,
    may_search: Callable[[InodeRecord], bool],
    searched: dict[InodeNo, bool],
) -> bool:
    """Whether all from *directory* up may be searched, up to one that was *searched* before.

    Who may reach a directory may search it and all above it (path_resolution(7)). Begin *searched*
    with the root. It gets what is found of *directory*.
    """
    above, ascent, passed = directory, Ascent(), list[InodeNo]()
    is_open = True
    while is_open and above not in searched and ascent.goes_on(above):
        try:
            record = index.inode(above)
        except Damaged:
            record = None
        if record is None:
            return False
        passed.append(above)
        is_open = may_search(record)
        above = record.parent
    is_open = is_open and searched.get(above, False)
    searched.update(dict.fromkeys(passed[:1], is_open))
    return is_open
