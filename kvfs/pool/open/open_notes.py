"""Notes about open inodes, for a server that takes over the mount (storage/outliving.py).

The handle table (mount/files/handles.py) says who has them open, and ``Living`` is what was read
from it. Index and extents say most of the rest. Notes are for what none of these says: inodes
without a name, what happened to a block that is being written, and closes that are answered and not
carried out.
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from kvfs.core.errors import Damaged
from kvfs.core.index_room import attributes_bytes
from kvfs.core.lifecycle import State
from kvfs.core.records import pack_inode, parse_inode
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.machine.processes import NOBODY, Maker
from kvfs.pool.open.open_inodes import OpenInode, OpenInodes
from kvfs.pool.space.space import Space
from kvfs.storage.outliving import Notes

#: Most bytes of the attributes of all inodes without a name. The index bounds those of inodes with
#: a name; these are in memory, and a client may open and remove as many files as it likes.
NAMELESS_MAX_BYTES: Final = 16 << 20
_NAMELESS: Final = b"n"
_KEY_INO_BYTES: Final = 8
_WRITING: Final = b"w"
_CLOSES: Final = b"c"
#: The flags that are noted of a block that is being written. Earlier versions knew only the first
#: _FLAGS_MIN, so later ones are written only if they are set.
_FLAGS: Final = ("torn", "overrun", "renamed", "emptied", "appended_only", "met", "locked")
_FLAGS_MIN: Final = 5


class LivingHandle(NamedTuple):
    """One handle, which *opens* opens of the kernel share."""

    ino: InodeNo
    writer: bool
    opens: int = 1
    #: Whether a file server has it, and whether it is on passthrough.
    served: bool = False
    passing: bool = False
    # ---- of a writer's handle ----
    appends: bool = False
    #: The thread that opened it, and its process.
    thread: int = 0
    maker: Maker = NOBODY
    #: Whether it was closed (FLUSH), and what size and mtime (ns) the extent had then.
    flushed: bool = False
    flushed_as: tuple[int, int] = (-1, 0)


class Living(NamedTuple):
    """All handles that clients still have when a server takes over a mount."""

    handles: Collection[LivingHandle]

    def by_inode(self) -> dict[InodeNo, list[LivingHandle]]:
        """Return the handles of each inode."""
        found: dict[InodeNo, list[LivingHandle]] = {}
        for handle in self.handles:
            found.setdefault(handle.ino, []).append(handle)
        return found

    def written(self) -> set[InodeNo]:
        """Return the inodes that have a writer."""
        return {handle.ino for handle in self.handles if handle.writer}


class NotedClose(NamedTuple):
    """A writer's close that is answered and not carried out; like ``Closing`` in publishing.py.

    ``tid`` is -1 if the close is not in doubt, but the index could not be written.
    """

    tid: int
    tgid: int
    birth: int
    fate: str
    at_s: float
    size_bytes: int
    mtime_ns: int


#: A close that is not in doubt, but is not in the index.
UNTOLD: Final = NotedClose(-1, 0, 0, "", 0.0, -1, 0)


def _key(kind: bytes, ino: InodeNo) -> bytes:
    return kind + ino.to_bytes(8, "little")


class OpenNotes:
    """The notes of open inodes."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        #: Bytes of the attributes of each inode without a name that has any.
        self._attributes: dict[InodeNo, int] = {}
        self._attributes_bytes = 0
        #: Open inodes with notes about their writers.
        self._written: set[InodeNo] = set()
        for ino in self.all_nameless():
            noted = self.nameless(ino)
            if noted is not None:
                self._count(ino, noted[1])

    def takes(self, ino: InodeNo, attributes: Mapping[bytes, bytes]) -> bool:
        """Whether *attributes* of *ino*, which has no name, fit into NAMELESS_MAX_BYTES."""
        before_bytes = self._attributes.get(ino, 0)
        more_bytes = attributes_bytes(attributes) - before_bytes
        return more_bytes <= 0 or self._attributes_bytes + more_bytes <= NAMELESS_MAX_BYTES

    def _count(self, ino: InodeNo, attributes: Mapping[bytes, bytes]) -> None:
        self._attributes_bytes -= self._attributes.pop(ino, 0)
        if attributes:
            self._attributes[ino] = held_bytes = attributes_bytes(attributes)
            self._attributes_bytes += held_bytes

    def lose_name(
        self, ino: InodeNo, record: InodeRecord, attributes: Mapping[bytes, bytes]
    ) -> Mapping[bytes, bytes]:
        """Note *record* and *attributes* of *ino*, which may be open while the index forgets it.

        Return the attributes that it keeps: all or, if they do not fit, none.
        """
        if not self.takes(ino, attributes):
            attributes = {}
        self._notes.put(_key(_NAMELESS, ino), (pack_inode(record), dict(attributes)))
        self._count(ino, attributes)
        return attributes

    def changed(self, opened: OpenInode) -> None:
        """Note the present record of *opened*, which has no name."""
        if opened.gone is not None:
            self.lose_name(opened.ino, opened.gone, opened.attributes)

    def end(self, ino: InodeNo) -> None:
        """Note that *ino*, which has no name, is gone."""
        self._notes.drop(_key(_NAMELESS, ino))
        self._count(ino, {})

    def nameless(self, ino: InodeNo) -> tuple[InodeRecord, Mapping[bytes, bytes]] | None:
        """Return record and attributes of *ino*, None if nothing is noted."""
        noted = self._notes.get(_key(_NAMELESS, ino))
        if noted is None:
            return None
        record, attributes = noted
        with contextlib.suppress(Damaged):
            return parse_inode(record), attributes
        return None

    def enter(self, open_inodes: OpenInodes, space: Space, ino: InodeNo) -> OpenInode | None:
        """Count a reading handle on *ino* if it is noted as nameless; else return None."""
        noted = self.nameless(ino)
        if noted is None:
            return None
        opened = open_inodes.enter(ino, writer=False)
        if opened.gone is None:
            record, attributes = noted
            opened.lose_name(record)
            opened.keep_attributes(attributes)
            opened.hold(record.allocated_bytes)
            space.extra_bytes += record.allocated_bytes
        return opened

    def all_nameless(self) -> list[InodeNo]:
        """Return every inode that is noted as nameless."""
        # Other notes with this first byte have longer keys.
        return [_ino(key) for key in self._notes.below(_NAMELESS) if len(key) == _KEY_INO_BYTES]

    def writing(self, opened: OpenInode) -> None:
        """Note what happened to *opened*, which has a writer."""
        flags = [bool(getattr(opened, name)) for name in _FLAGS]
        while len(flags) > _FLAGS_MIN and not flags[-1]:
            flags.pop()
        self._notes.put(_key(_WRITING, opened.ino), (*flags, int(opened.before)))
        self._written.add(opened.ino)

    def recall(self, opened: OpenInode, state: State) -> None:
        """Restore what happened to *opened*, a block in *state* that is being written."""
        noted = self._notes.get(_key(_WRITING, opened.ino))
        if noted is None:
            opened.recall(state)
            return
        *flags, before = noted
        missing = [False] * (len(_FLAGS) - len(flags))
        opened.recall(state, State(before), dict(zip(_FLAGS, flags + missing, strict=True)))
        self._written.add(opened.ino)

    def closes(self, opened: OpenInode, closes: Iterable[NotedClose]) -> None:
        """Note the *closes* of *opened* that are answered and not carried out."""
        self._notes.put(_key(_CLOSES, opened.ino), [tuple(close) for close in closes])
        self._written.add(opened.ino)

    def all_closes(self) -> Iterator[tuple[InodeNo, list[NotedClose]]]:
        """Yield each inode that has noted closes, with these."""
        for key, rows in self._notes.below(_CLOSES).items():
            yield _ino(key), [NotedClose(*close) for close in rows]

    def written(self, opened: OpenInode) -> None:
        """Remove the note that *opened* has a writer, if there is one: the writer has closed."""
        if opened.ino in self._written:
            self._written.discard(opened.ino)
            self.forget(opened.ino)

    def forget(self, ino: InodeNo) -> None:
        """Drop the notes about the writers of *ino*."""
        key = ino.to_bytes(_KEY_INO_BYTES, "little")
        self._notes.drop(_WRITING + key)
        self._notes.drop(_CLOSES + key)

    def all_written(self) -> set[InodeNo]:
        """Return every inode with notes about its writers."""
        return {_ino(key) for kind in (_WRITING, _CLOSES) for key in self._notes.below(kind)}


def _ino(key: bytes) -> InodeNo:
    return InodeNo(int.from_bytes(key, "little"))
