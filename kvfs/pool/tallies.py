"""Counts of loads, misses, stores and evictions, by first-level directory and by model.

A load of a known block must cost next to nothing. So each pair of a directory and a model has one
object, which an open handle keeps, and sums are computed on demand.
"""

from collections.abc import Iterable
from typing import Any, Final

from kvfs.core.types import NO_INODE, ROOT_INODE, InodeNo
from kvfs.storage.index import Index

#: Stands for directories or models beyond the limit. No real name has a slash.
OTHERS: Final = "/others"
#: Stands for files in the root directory itself.
ROOT_ITSELF: Final = "/"
_OTHERS_NAME: Final = OTHERS.encode()
#: Directories whose first-level directory is remembered; for others it is looked up again.
_KNOWN_MAX: Final = 4096
#: Most levels to go up to find it, each a read of an index row. Deeper directories count with all
#: others: no connector has so many levels.
DEPTH_MAX: Final = 32


class Tally:
    """The counts of one directory and model."""

    __slots__ = (
        "evicted_blocks",
        "evicted_bytes",
        "hits",
        "loaded_bytes",
        "misses",
        "stored_blocks",
        "stored_bytes",
    )

    def __init__(self) -> None:
        self.hits = self.loaded_bytes = self.misses = 0
        self.stored_blocks = self.stored_bytes = 0
        self.evicted_blocks = self.evicted_bytes = 0

    def add(self, other: "Tally") -> None:
        """Add the counts of *other*."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def shown(self) -> dict[str, Any]:
        """Return the counts, and ``hit_rate``: hits / (hits + misses), None if both are 0."""
        asked = self.hits + self.misses
        return {
            "hits": self.hits,
            "misses": self.misses,
            "hit_rate": self.hits / asked if asked else None,
            "loaded_bytes": self.loaded_bytes,
            "stored_blocks": self.stored_blocks,
            "stored_bytes": self.stored_bytes,
            "evicted_blocks": self.evicted_blocks,
            "evicted_bytes": self.evicted_bytes,
        }


def sum_of(tallies: Iterable[Tally]) -> Tally:
    """Return the sum of *tallies*."""
    total = Tally()
    for tally in tallies:
        total.add(tally)
    return total


def model_of(name: bytes) -> bytes:
    """Return the model in a block's *name*; b"" if the connector does not put it there.

    LMCache: ``MODEL@WORLD@RANK@HASH@DTYPE.pt`` and ``MODEL@RANK@GROUP@HASH.data``.
    """
    parts = name.split(b"@", 3)
    return parts[0] if len(parts) == 4 else b""


class Tallies:
    """The tallies of one pool, of up to *names_max* directories and models; the rest share one."""

    def __init__(self, index: Index, names_max: int) -> None:
        self._index: Final = index
        self._names_max: Final = names_max
        self._tallies: dict[tuple[InodeNo, bytes], Tally] = {}
        self._tops: set[InodeNo] = set()
        self._models: set[bytes] = set()
        #: The tally that was returned last, and for what.
        self._last_parent = NO_INODE
        self._last_model = b""
        self._last = Tally()
        #: The first-level directory above a directory.
        self._known: dict[InodeNo, InodeNo] = {}

    def of(self, parent: InodeNo, name: bytes) -> Tally:
        """Return the tally that counts *name* in directory *parent*."""
        model = model_of(name)
        # Most names have the same directory and model as the one before.
        if parent == self._last_parent and model == self._last_model:
            return self._last
        top = self._known.get(parent)
        if top is None:
            top = self._find_top(parent)
        tally = self._tallies.get((top, model))
        if tally is None:
            tally = self._enter(top, model)
        self._last_parent, self._last_model, self._last = parent, model, tally
        return tally

    def tree_changed(self) -> None:
        """A directory moved: what is opened below it from now on counts where it is now."""
        self._known.clear()
        self._forget_last()

    def _forget_last(self) -> None:
        self._last_parent = NO_INODE

    def all(self) -> Tally:
        """Return the sum of everything counted."""
        return sum_of(self._tallies.values())

    def by_directory(self) -> dict[str, Tally]:
        """Return the tallies of the first-level directories by name."""
        self._fold_removed()
        found: dict[str, Tally] = {}
        for (top, _), tally in self._tallies.items():
            found.setdefault(self._shown_top(top), Tally()).add(tally)
        return found

    def by_model(self) -> dict[str, Tally]:
        """Return the tallies of the models by name; blocks whose name has no model are left out."""
        found: dict[str, Tally] = {}
        for (_, model), tally in self._tallies.items():
            if model:
                found.setdefault(model.decode(errors="backslashreplace"), Tally()).add(tally)
        return found

    def _find_top(self, directory: InodeNo) -> InodeNo:
        """Return the first-level directory that *directory* is or lies in; the root for itself.

        ``NO_INODE`` if a directory on the way cannot be read, or if it is deeper than DEPTH_MAX.
        """
        at = top = directory
        found: InodeNo | None = None
        for _ in range(DEPTH_MAX):
            if at == ROOT_INODE or (found := self._known.get(at)) is not None:
                break
            record = self._index.inode_or_miss(at)
            if record is None:
                return NO_INODE
            top, at = at, record.parent
        else:
            top = NO_INODE
        if len(self._known) >= _KNOWN_MAX:
            self._known.clear()
        self._known[directory] = top = top if found is None else found
        return top

    def _enter(self, top: InodeNo, model: bytes) -> Tally:
        """Return a new tally, or that of all others if there are too many names."""
        if top not in self._tops and len(self._tops) >= self._names_max:
            self._fold_removed()
        if top not in self._tops and len(self._tops) >= self._names_max:
            top = NO_INODE
        if model not in self._models and len(self._models) >= self._names_max:
            model = _OTHERS_NAME
        if top != NO_INODE:
            self._tops.add(top)
        if model and model != _OTHERS_NAME:
            self._models.add(model)
        return self._tallies.setdefault((top, model), Tally())

    def _fold_removed(self) -> None:
        """Add the counts of removed directories to those of all others."""
        gone = {top for top in self._tops if self._index.inode_or_miss(top) is None}
        if not gone:
            return
        self._tops -= gone
        self._forget_last()
        for top, model in [key for key in self._tallies if key[0] in gone]:
            removed = self._tallies.pop((top, model))
            self._tallies.setdefault((NO_INODE, model), Tally()).add(removed)

    def _shown_top(self, top: InodeNo) -> str:
        if top == ROOT_INODE:
            return ROOT_ITSELF
        record = None if top == NO_INODE else self._index.inode_or_miss(top)
        return OTHERS if record is None else record.name.decode(errors="backslashreplace")
