"""Open handles in one shared-memory table, so that a successor of this process finds them.

A page with magic and version, then rows of 96 bytes: u64 inode, u32 open flags, i32 backing id, u32
generation, u8 kind, u8 whether a file server has it, u8 whether it was closed (FLUSH), u8 fate of
the closing process, u64 request that changed the row last, u32 opens that share it, u32 user that
it is charged to. For a writer u32 thread, u32 process, u64 birth of that follow; for its last close
i32 thread, u32 process, u64 birth, f64 time, i64 size, i64 mtime. A handle number is generation <<
32 | slot + 1: a number that was closed is never valid again, and a free row keeps its generation. A
handle that is kept for the next reader (shared_handles.py) has no opens meanwhile. Row first, reply
after: the kernel must never know a handle that the table does not.
"""

import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from typing import Final

from kvfs.core.account import ROOT, Accounts, Taken
from kvfs.core.errors import BadHandle, TooManyOpen
from kvfs.core.types import NO_BACKING_ID, PAGE_BYTES, BackingId, HandleNo, InodeNo
from kvfs.engine.blocks.publishing import Closing
from kvfs.machine.process_ends import Fate
from kvfs.machine.process_limits import clients_max
from kvfs.machine.processes import Maker
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.open.open_notes import Living, LivingHandle
from kvfs.storage.journal import RESENT
from kvfs.storage.shared_table import begin_table, require_table

#: Goes up when the layout of a row changes.
HANDLES_VERSION: Final = 1
_TABLE_MAGIC: Final = b"KVFSHNDL"
_ROWS_START: Final = PAGE_BYTES
_ROW: Final = struct.Struct("<QIiIBBBBQII")
_ROW_BYTES: Final = 96
#: The request and the opens of a row, written together.
_OPENS: Final = struct.Struct("<QI")
_OPENS_OFFSET: Final = 24
_WRITER: Final = struct.Struct("<IIQ")
_WRITER_OFFSET: Final = 40
_SERVED: Final = struct.Struct("<B")
_SERVED_OFFSET: Final = 21
_UID: Final = struct.Struct("<I")
#: (uid_t)-1 is no user (chown(2)).
_NO_UID: Final = (1 << 32) - 1
_UID_OFFSET: Final = 36
_FLUSHED: Final = struct.Struct("<BB")
_FLUSHED_OFFSET: Final = 22
_CLOSING: Final = struct.Struct("<iIQdqq")
_CLOSING_OFFSET: Final = 56
assert _ROW.size == _WRITER_OFFSET
assert _CLOSING_OFFSET + _CLOSING.size == _ROW_BYTES
_GROW_ROWS: Final = 4096
#: libfuse hands open flags on as a signed int.
_U32_MASK: Final = (1 << 32) - 1
_FATES: Final = tuple(Fate)
#: Shares of what all clients may have: beyond the first only tenants with few get more, and beyond
#: the second only root.
_FOR_ALL: Final = 3 / 4
_FOR_USERS: Final = 7 / 8
#: A tenant below this share has few. As many such as fit between the two shares above find
#: room, whatever others do.
_FEW: Final = 1 / 64


class OpenShares:
    """How many of the server's descriptors clients may take: each tenant, and all together.

    An open file of a client may cost a descriptor here: each block that is written does, and on the
    daemon path each that is read. At the server's limit nobody could open a file. So the last
    descriptors are kept for tenants that have few, and the very last for root.
    """

    def __init__(self, open_files: Taken, share: float, ready_extents: int = 0) -> None:
        """Let each tenant but root have *share* of what clients may have (process_limits.py).

        They are counted in *open_files*. *ready_extents*: the setting ``ready_extents_max``.
        """
        self._share: Final = share
        self._ready_extents: Final = ready_extents
        self.open_files: Final = open_files

    def require_one(self, uid: int, give_up_one: Callable[[], bool]) -> None:
        """Raise TooManyOpen if the tenant of *uid* has its share, or all together have theirs.

        Before that, *give_up_one* closes a handle that is only kept for a next reader; False: none.
        """
        while not self._may_have_one(uid):
            if not give_up_one():
                raise TooManyOpen(f"uid {uid} has {self.open_files.by(uid)} files open")

    def _may_have_one(self, uid: int) -> bool:
        most, together = clients_max(self._ready_extents), self.open_files.total
        if uid == ROOT:
            return together < most
        held = self.open_files.by(uid)
        if held >= int(most * self._share) or together >= most * _FOR_USERS:
            return False
        return together < most * _FOR_ALL or held < most * _FEW


class HandleKind(IntEnum):
    """What a handle is for; FREE marks an unused row."""

    FREE = 0
    READER = 1
    WRITER = 2
    DIRECTORY = 3


class Handle:
    """One handle; ``opened`` is the inode it keeps open, ``opens`` how many share it."""

    __slots__ = (
        "backing_id",
        "closing",
        "fh",
        "flags",
        "flushed",
        "holder",
        "kind",
        "opened",
        "opens",
        "served",
        "slot",
        "tid",
        "uid",
    )

    def __init__(
        self,
        slot: int,
        fh: HandleNo,
        kind: HandleKind,
        flags: int,
        opened: OpenInode,
        backing_id: BackingId,
    ) -> None:
        self.slot = slot
        self.fh = fh
        self.kind = kind
        self.flags = flags
        self.opened = opened
        self.backing_id = backing_id
        self.opens = 1
        #: Of a writer: the thread that opened it, whether it was closed, and its last close.
        self.tid = 0
        self.flushed = False
        self.closing: Closing | None = None
        #: Whether a file server has it, which may keep it for ever.
        self.served = False
        #: The user that it is charged to, -1: none (OpenShares).
        self.uid = -1
        #: The user that keeps its bytes from eviction, -1: it is not known (held_shares.py).
        self.holder = -1


class Handles:
    """The table: rows in shared memory, and this process's view of them."""

    def __init__(self, fd: int, shares: OpenShares | None = None) -> None:
        """Use the file *fd* (a memfd, or a file on tmpfs), which is grown as needed.

        *shares* is told when a handle that it counted ends. Raises FormatUnknown for a table of
        another version.
        """
        self.fd: Final = fd
        self.shares = OpenShares(Accounts().open_files, 1.0) if shares is None else shares
        self._generation = 0
        self._rows = 0
        self._free: list[int] = []
        self._open: dict[int, Handle] = {}
        found_bytes = os.fstat(fd).st_size
        self._grow((found_bytes - _ROWS_START) // _ROW_BYTES if found_bytes else _GROW_ROWS)
        if not found_bytes:
            begin_table(self._memory, _TABLE_MAGIC, HANDLES_VERSION)
        require_table(self._memory, _TABLE_MAGIC, HANDLES_VERSION, "handle table")

    def _grow(self, more_rows: int) -> None:
        rows = self._rows + more_rows
        os.ftruncate(self.fd, _ROWS_START + rows * _ROW_BYTES)
        self._memory = mmap.mmap(self.fd, _ROWS_START + rows * _ROW_BYTES)
        self._free.extend(range(rows - 1, self._rows - 1, -1))
        self._rows = rows

    def __len__(self) -> int:
        """Return how many opens there are: two that share a handle are two."""
        return sum(handle.opens for handle in self._open.values())

    def open(
        self,
        kind: HandleKind,
        flags: int,
        opened: OpenInode,
        backing_id: BackingId = NO_BACKING_ID,
        request: int = 0,
    ) -> Handle:
        """Record a new handle, which *request* opens, and return it."""
        if not self._free:
            self._grow(_GROW_ROWS)
        slot = self._free.pop()
        self._generation = generation = (self._generation + 1) & 0x7FFFFFFF
        fh = HandleNo(generation << 32 | (slot + 1))
        handle = Handle(slot, fh, kind, flags, opened, backing_id)
        # fmt: off
        _ROW.pack_into(
            self._memory, _ROWS_START + slot * _ROW_BYTES, opened.ino, flags & _U32_MASK,
            backing_id, generation, kind, 0, 0, 0, request, 1, _NO_UID,
        )
        # fmt: on
        self._open[fh] = handle
        return handle

    def get(self, fh: int) -> Handle:
        """Return the open handle *fh*. Raises BadHandle."""
        handle = self._open.get(fh)
        if handle is None or not handle.opens:
            raise BadHandle(f"handle {fh:#x}")
        return handle

    def share(self, handle: Handle, request: int = 0) -> None:
        """Count one more open of *handle*, which may have none, for *request*."""
        handle.opens = opens = handle.opens + 1
        offset = _ROWS_START + handle.slot * _ROW_BYTES + _OPENS_OFFSET
        _OPENS.pack_into(self._memory, offset, request, opens)

    def leave(self, handle: Handle, request: int = 0) -> None:
        """Count one open of *handle* less; one without any is there for ``share`` or ``forget``."""
        handle.opens = opens = handle.opens - 1
        offset = _ROWS_START + handle.slot * _ROW_BYTES + _OPENS_OFFSET
        _OPENS.pack_into(self._memory, offset, request, opens)

    def forget(self, handle: Handle) -> None:
        """Free the row and the number of *handle*, which has no opens."""
        del self._open[handle.fh]
        if handle.uid >= 0:
            self.shares.open_files.count(handle.uid, -1)
        self._memory[self._kind_at(handle.slot)] = HandleKind.FREE
        self._free.append(handle.slot)

    def _kind_at(self, slot: int) -> int:
        return _ROWS_START + slot * _ROW_BYTES + _SERVED_OFFSET - 1

    def close(self, fh: int, request: int = 0) -> Handle:
        """Count one open of handle *fh* less, and forget it with the last. Raises BadHandle."""
        handle = self.get(fh)
        self.leave(handle, request)
        if not handle.opens:
            self.forget(handle)
        return handle

    def held(self) -> Iterator[Handle]:
        """Yield the handles that have opens, if it is known who holds them; no file server's."""
        rows = self._open.values()
        return (each for each in rows if each.opens and each.holder >= 0 and not each.served)

    def inodes(self) -> set[InodeNo]:
        """Return the inodes that have an open handle."""
        return {handle.opened.ino for handle in self._open.values() if handle.opens}

    # ---- what else a row says ----

    def charge(self, handle: Handle, uid: int) -> None:
        """Charge *handle* to the share of *uid*, who holds it."""
        handle.uid = handle.holder = uid
        self.shares.open_files.count(uid, 1)
        offset = _ROWS_START + handle.slot * _ROW_BYTES + _UID_OFFSET
        _UID.pack_into(self._memory, offset, uid)

    def hold_for(self, handle: Handle, uid: int) -> None:
        """Note that *uid* keeps the bytes of *handle* from eviction; no row tells of it."""
        handle.holder = uid

    def note_served(self, handle: Handle) -> None:
        """Note that a file server has *handle*."""
        handle.served = True
        self._memory[_ROWS_START + handle.slot * _ROW_BYTES + _SERVED_OFFSET] = 1

    def note_writer(self, handle: Handle, tid: int, maker: Maker) -> None:
        """Note which thread of which process writes through *handle*."""
        handle.tid = tid
        offset = _ROWS_START + handle.slot * _ROW_BYTES + _WRITER_OFFSET
        _WRITER.pack_into(self._memory, offset, tid & _U32_MASK, *maker)

    def note_close(self, handle: Handle, closing: Closing | None) -> None:
        """Note that a descriptor of *handle* was closed, how and by whom as in *closing*."""
        handle.flushed, handle.closing = True, closing
        start = _ROWS_START + handle.slot * _ROW_BYTES
        fate = 0
        if closing is not None:
            tid, (tgid, birth), how, at_s, size_bytes, mtime_ns = closing
            fate = 1 + _FATES.index(how)
            _CLOSING.pack_into(
                self._memory, start + _CLOSING_OFFSET, tid, tgid, birth, at_s, size_bytes, mtime_ns
            )
        _FLUSHED.pack_into(self._memory, start + _FLUSHED_OFFSET, 1, fate)

    # ---- after another server ----

    def living(self) -> Living:
        """Return the handles that the last server left."""
        return Living([_living(self._memory, slot) for slot in self._used()])

    def _used(self) -> list[int]:
        """Return the rows of handles that have opens."""
        return [slot for slot in range(self._rows) if self._is_used(slot)]

    def _is_used(self, slot: int) -> bool:
        if self._memory[self._kind_at(slot)] == HandleKind.FREE:
            return False
        offset = _ROWS_START + slot * _ROW_BYTES + _OPENS_OFFSET
        return bool(_OPENS.unpack_from(self._memory, offset)[1])

    def recall(self, open_inodes: Mapping[InodeNo, OpenInode]) -> "Recalled":
        """Make the handles of the last server again, on the same *open_inodes*."""
        recalled = Recalled([], {}, set())
        free: list[int] = []
        for slot in range(self._rows - 1, -1, -1):
            row = _ROW.unpack_from(self._memory, _ROWS_START + slot * _ROW_BYTES)
            ino, flags, backing_id, generation, kind, served, _, _, request, opens, uid = row
            self._generation = max(self._generation, generation)
            request &= ~RESENT
            if not self._is_used(slot):
                self._memory[self._kind_at(slot)] = HandleKind.FREE
                recalled.closed.add(request)
                free.append(slot)
                continue
            fh = HandleNo(generation << 32 | (slot + 1))
            handle = Handle(
                slot, fh, HandleKind(kind), flags, open_inodes[ino], BackingId(backing_id)
            )
            handle.opens, handle.served = opens, bool(served)
            if uid != _NO_UID:
                handle.uid = handle.holder = uid
                self.shares.open_files.count(uid, 1)
            if kind == HandleKind.WRITER:
                handle.tid, _, handle.flushed, handle.closing = _writing(self._memory, slot)
            self._open[fh] = recalled.by_request[request] = handle
            recalled.handles.append(handle)
        self._free = free
        recalled.closed.discard(0)
        return recalled


class Recalled:
    """The handles that were made again."""

    def __init__(
        self, handles: list[Handle], by_request: dict[int, Handle], closed: set[int]
    ) -> None:
        self.handles = handles
        #: By the request that opened them, or shared or left them last.
        self.by_request = by_request
        #: Requests that closed handles which are gone.
        self.closed = closed


def _writing(memory: mmap.mmap, slot: int) -> tuple[int, Maker, bool, Closing | None]:
    """Return thread, process, and whether and how it was closed, of a writer's row."""
    start = _ROWS_START + slot * _ROW_BYTES
    tid, tgid, birth = _WRITER.unpack_from(memory, start + _WRITER_OFFSET)
    flushed, fate = _FLUSHED.unpack_from(memory, start + _FLUSHED_OFFSET)
    closing = None
    if fate:
        by, by_tgid, by_birth, at_s, size_bytes, mtime_ns = _CLOSING.unpack_from(
            memory, start + _CLOSING_OFFSET
        )
        how = _FATES[fate - 1]
        closing = Closing(by, Maker(by_tgid, by_birth), how, at_s, size_bytes, mtime_ns)
    return tid, Maker(tgid, birth), bool(flushed), closing


def _living(memory: mmap.mmap, slot: int) -> LivingHandle:
    row = _ROW.unpack_from(memory, _ROWS_START + slot * _ROW_BYTES)
    ino, flags, backing_id, _, kind, served, _, _, _, opens, _ = row
    if kind != HandleKind.WRITER:
        return LivingHandle(InodeNo(ino), False, opens, bool(served), bool(backing_id))
    tid, maker, flushed, closing = _writing(memory, slot)
    flushed_as = (-1, 0) if closing is None else (closing.size_bytes, closing.mtime_ns)
    appends = bool(flags & os.O_APPEND)
    return LivingHandle(
        InodeNo(ino),
        True,
        opens,
        bool(served),
        bool(backing_id),
        appends,
        tid,
        maker,
        flushed,
        flushed_as,
    )
