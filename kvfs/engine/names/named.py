"""The files and directories that a command names: by paths, by a pattern, or those used last.

Those named by paths or a pattern are found in steps. Requests are answered between two steps, so a
walk looks at each name and each directory again when it comes to it.
"""

import fnmatch
import re
import stat
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np

from kvfs.core.errors import Damaged, PathMissing, UsageError
from kvfs.core.eviction_policy import EVICTABLE, Columns, Rank
from kvfs.core.lifecycle import SETTLED
from kvfs.core.shown_names import printable
from kvfs.core.types import PATH_MAX_BYTES, ROOT_INODE, InodeNo, InodeRecord
from kvfs.engine.names.namespace import Namespace
from kvfs.pool.rules.paths import path_of
from kvfs.storage.index import Index

#: Names looked at in one step: a millisecond or two.
_LOOKED_AT: Final = 256
#: What a directory costs in addition, as so many names: deep trees have few names in each.
_OF_A_DIRECTORY: Final = 8
#: What a walk yields at the end of a step.
STEP: Final = InodeNo(0)
#: A list is kept in memory while a client fetches it: 512 KiB.
HOTTEST_MAX: Final = 1 << 16
_RANKS: Final = tuple(int(rank) for rank in (*EVICTABLE, Rank.KEPT))
#: A walk's position in a pattern: the numbers of the parts that the next name may match.
Reached = frozenset[int]

_NOWHERE: Final = frozenset({".", ".."})


class PathPattern:
    """One pattern of paths relative to the mountpoint, such as ``lmcache/model@*``.

    Like a shell's: ``*``, ``?``, ``[...]`` in a name, ``**`` for any names. Unlike in a shell,
    ``*`` also matches a dot at the beginning of a name.

    A walk down a tree matches a name at a time, so it never enters a directory below which nothing
    can match. The time per name is bounded: patterns do not backtrack as some regular expressions
    do (fnmatch.translate of Python 3.11 makes atomic groups).
    """

    def __init__(self, text: str) -> None:
        """Raises ValueError if no path can match *text*."""
        names = [name for name in text.split("/") if name]
        if not names:
            raise ValueError("the pattern is empty")
        if len(text) > PATH_MAX_BYTES:
            raise ValueError(f"the pattern is longer than {PATH_MAX_BYTES} characters")
        if not _NOWHERE.isdisjoint(names):
            raise ValueError(f"{text!r}: leave out '.' and '..'")
        if names[-1] == "**":
            names.append("*")  # what lies below, and not the directory itself
        #: None stands for ``**``.
        self._parts = [
            None if name == "**" else re.compile(fnmatch.translate(name)) for name in names
        ]
        #: The position of a walk that is at the mountpoint.
        self.start: Final = self._widened({0})

    def after(self, reached: Reached, name: bytes) -> Reached:
        """Return the position after *name*, from position *reached*.

        It is empty if nothing at or below the name can match.
        """
        text = name.decode(errors="surrogateescape")
        found = set[int]()
        for at in reached:
            part = self._parts[at] if at < len(self._parts) else None
            if at < len(self._parts) and part is None:
                found.add(at)
            elif part is not None and part.match(text):
                found.add(at + 1)
        return self._widened(found)

    def is_matched(self, reached: Reached) -> bool:
        """Whether the path walked so far matches the whole pattern."""
        return len(self._parts) in reached

    def _widened(self, reached: set[int]) -> Reached:
        """Return *reached* and what follows it when ``**`` matches no name."""
        for at in sorted(reached):
            while at < len(self._parts) and self._parts[at] is None:
                at += 1
                reached.add(at)
        return frozenset(reached)


class Named(NamedTuple):
    """What a command names; paths are below the mountpoint, "" is all of it."""

    paths: tuple[str, ...]
    match: str | None = None
    """Only what matches, at or below the paths; a directory stands for all that is below it."""


class _Pace:
    """Counts the names that a walk looks at, and ends its steps."""

    def __init__(self) -> None:
        self._looked_at = 0

    def after(self, names: int) -> Iterator[InodeNo]:
        """Yield STEP if, with so many *names* of a directory, enough were looked at."""
        self._looked_at += names + _OF_A_DIRECTORY
        if self._looked_at >= _LOOKED_AT:
            self._looked_at = 0
            yield STEP

    def at_the_end(self) -> Iterator[InodeNo]:
        """Yield STEP if the last step is not over."""
        if self._looked_at:
            yield STEP


def find(index: Index, namespace: Namespace, path: str) -> InodeNo:
    """Return the inode at *path* below the mountpoint. Raises PathMissing."""
    ino = ROOT_INODE
    for name in _names(path):
        found = None
        try:
            if stat.S_ISDIR(namespace.record(ino).mode):
                found = index.lookup(ino, name)
        except Damaged:
            found = None
        if found is None:
            raise PathMissing(f"there is no {printable(path)} on this mount")
        ino = found
    return ino


def named(index: Index, namespace: Namespace, what: Named) -> Iterator[InodeNo]:
    """Yield each inode that *what* names, none below another, and STEP after every step.

    Raises PathMissing before anything else if a path is missing, and UsageError.
    """
    pattern = pattern_of(what)
    roots = [(find(index, namespace, path), path) for path in outermost(what.paths)]
    for root, path in roots:
        if pattern is None:
            yield root
        else:
            yield from _matching(index, root, path, pattern)


def pattern_of(what: Named) -> PathPattern | None:
    """Return the pattern of *what*, if it has one. Raises UsageError."""
    try:
        return None if what.match is None else PathPattern(what.match)
    except ValueError as error:
        raise UsageError(f"--match: {error}") from None


def outermost(paths: Iterable[str]) -> list[str]:
    """Return *paths* without those that lie below another one."""
    once = {path.strip("/") for path in paths}
    return sorted(path for path in once if once.isdisjoint(_above(path)))


def files_below(index: Index, root: InodeNo) -> Iterator[InodeNo]:
    """Yield each file at or below *root*, and STEP after every step."""
    waiting, pace = [root], _Pace()
    while waiting:
        at = waiting.pop()
        record = index.inode_or_miss(at)
        if record is None:
            continue
        if not stat.S_ISDIR(record.mode):
            yield at
            continue
        for children in index.below(at, _LOOKED_AT):
            for ino, _ in children:
                child = index.inode_or_miss(ino)
                if child is not None and stat.S_ISDIR(child.mode):
                    if _leads_down(at, ino, child, root):
                        waiting.append(ino)
                elif child is not None and stat.S_ISREG(child.mode):
                    yield ino
            yield from pace.after(len(children))
    yield from pace.at_the_end()


def _matching(index: Index, root: InodeNo, path: str, pattern: PathPattern) -> Iterator[InodeNo]:
    """Yield what matches *pattern* at or below *root*, the inode at *path*."""
    reached = pattern.start
    for name in _names(path):
        reached = pattern.after(reached, name)
        if pattern.is_matched(reached):  # *path* lies below what matches
            yield root
            return
    waiting: list[tuple[InodeNo, InodeNo, Reached]] = [(ROOT_INODE, root, reached)]
    pace = _Pace()
    while waiting:
        above, at, reached = waiting.pop()
        record = index.inode_or_miss(at)
        if record is None or not stat.S_ISDIR(record.mode):
            continue
        if at != root and record.parent != above:
            continue  # it has moved since, or the listing was wrong
        for children in index.below(at, _LOOKED_AT):
            for ino, name in children:
                further = pattern.after(reached, name)
                if pattern.is_matched(further):
                    yield ino
                elif further and ino != root:
                    waiting.append((at, ino, further))
            yield from pace.after(len(children))
    yield from pace.at_the_end()


def _leads_down(at: InodeNo, ino: InodeNo, child: InodeRecord, root: InodeNo) -> bool:
    """Whether a walk below *root* goes on from *at* to *ino*, which has the record *child*.

    The walk trusts the parent in the inode, not the listing. Each inode has one parent, so the walk
    visits none twice, however wrong the listings are, except a *root* that is below itself.
    """
    return child.parent == at and ino != root


def _names(path: str) -> list[bytes]:
    return [name.encode(errors="surrogateescape") for name in path.split("/") if name]


def _above(path: str) -> Iterator[str]:
    """Yield the directories above *path*, the mountpoint last."""
    while path:
        path = path.rpartition("/")[0]
        yield path


def hottest(columns: Columns, count_max: int = HOTTEST_MAX) -> list[InodeNo]:
    """Return the inodes touched last, the last one first; may run in a thread.

    It takes some 130 ms for a million rows. A stop writes the heat to HEAT (docs/dev/format.md),
    and the next start reads it. So after a start these are the blocks that were hot before it.
    """
    rows = np.flatnonzero((columns.ino != 0) & np.isin(columns.rank, _RANKS))
    touched = columns.touched[rows]
    if len(rows) > count_max:
        part = np.argpartition(touched, len(rows) - count_max)[len(rows) - count_max :]
        rows, touched = rows[part], touched[part]
    order = np.argsort(touched, kind="stable")[::-1]
    return [InodeNo(int(ino)) for ino in columns.ino[rows[order]]]


def path_and_size(index: Index, ino: InodeNo) -> tuple[str, int] | None:
    """Return the path of block *ino* below the mountpoint, and its bytes.

    None if it is gone, or if its path is too long for any call.
    """
    record = index.inode_or_miss(ino)
    if record is None or not stat.S_ISREG(record.mode) or record.state not in SETTLED:
        return None
    path = path_of(index, ino)
    return (path, record.allocated_bytes) if path.startswith("/") else None
