"""The fast path: requests that are answered from tables, without a coroutine.

OPEN for reading, FLUSH, RELEASE, GETATTR and LOOKUP are answered within the message that asks,
with the same store calls that the handlers make; only their way to the kernel is shorter.
"""

from collections.abc import Callable
from typing import Final

from kvfs.core.errors import NotFound
from kvfs.core.lifecycle import UNFINISHED
from kvfs.core.settings import Settings
from kvfs.core.types import PAGE_BYTES, ROOT_INODE, STAT_BLOCK_BYTES, InodeNo, InodeRecord
from kvfs.engine.store import Store
from mount.files.files import NOT_A_READER, Files
from mount.fuse.channel import Answer
from mount.fuse.wire import (
    ATTR,
    ATTR_OUT_HEAD,
    ENTRY_OUT_BYTES,
    ENTRY_OUT_HEAD,
    FLUSH_IN,
    OPEN_IN,
    OPEN_OUT,
    OUT_HEADER,
    OUT_HEADER_BYTES,
    RELEASE_IN,
    Opcode,
    error_reply,
)
from mount.requests.entry_attributes import CREATED_S, link_count

_NS: Final = 1_000_000_000
_OPEN_REPLY_BYTES: Final = OUT_HEADER_BYTES + OPEN_OUT.size
_ATTR_REPLY_BYTES: Final = OUT_HEADER_BYTES + ATTR_OUT_HEAD.size + ATTR.size
_ENTRY_REPLY_BYTES: Final = OUT_HEADER_BYTES + ENTRY_OUT_BYTES
_NO_ATTR: Final = bytes(ATTR.size)
_pack_out = OUT_HEADER.pack


class FastAnswers:
    """The answers of the lane; all run on the trio thread and never wait.

    What one of them raises the channel answers, with its errno.
    """

    def __init__(
        self,
        store: Store,
        files: Files,
        settings: Settings,
        generation: int,
        requester: Callable[[], int],
    ) -> None:
        """*requester* tells the thread that made the request being answered."""
        self._requester = requester
        self._store = store
        self._files = files
        self._generation = generation & 0xFFFFFFFF
        self.apply(settings)

    def apply(self, settings: Settings) -> None:
        """Take the timeouts of *settings*."""
        self._entry_valid = _split(settings.entry_timeout_s)
        self._attr_valid = _split(settings.attr_timeout_s)
        self._negative_valid = _split(settings.negative_timeout_s)

    def answers(self) -> dict[int, Answer]:
        """Return the lane's answers by opcode."""
        return {
            Opcode.LOOKUP: self._lookup,
            Opcode.GETATTR: self._getattr,
            Opcode.OPEN: self._open,
            Opcode.FLUSH: self._flush,
            Opcode.RELEASE: self._release,
        }

    def _lookup(self, unique: int, nodeid: int, request: memoryview) -> bytes | None:
        if self._store.blocks.truncating.refusals:
            return None
        try:
            ino = self._store.namespace.lookup(InodeNo(nodeid), bytes(request[:-1]))
            record = self._store.blocks.present(ino)
            if record.state in UNFINISHED:
                return None  # who may see it, and for how long, is a matter of policy
            self._store.pool.heat.touch(ino)
        except NotFound:
            valid_s, valid_ns = self._negative_valid
            head = ENTRY_OUT_HEAD.pack(0, 0, valid_s, 0, valid_ns, 0)
            return _pack_out(_ENTRY_REPLY_BYTES, 0, unique) + head + _NO_ATTR
        attr, (attr_s, attr_ns) = self._attr(ino, record)
        valid_s, valid_ns = self._entry_valid
        generation = 0 if ino == ROOT_INODE else self._generation  # as Entries says it
        head = ENTRY_OUT_HEAD.pack(ino, generation, valid_s, attr_s, valid_ns, attr_ns)
        return _pack_out(_ENTRY_REPLY_BYTES, 0, unique) + head + attr

    def _getattr(self, unique: int, nodeid: int, _request: memoryview) -> bytes:
        ino = InodeNo(nodeid)
        record = self._store.blocks.present(ino)
        attr, (valid_s, valid_ns) = self._attr(ino, record)
        head = ATTR_OUT_HEAD.pack(valid_s, valid_ns, 0)
        return _pack_out(_ATTR_REPLY_BYTES, 0, unique) + head + attr

    def created(self, ino: InodeNo, record: InodeRecord, *, name_trusted: bool) -> bytes:
        """Return struct fuse_entry_out of a new draft, as ``Entries.created`` does."""
        attr, _ = self._attr(ino, record)
        valid_s, valid_ns = self._entry_valid if name_trusted else (0, 0)
        attr_s, attr_ns = _CREATED_VALID
        head = ENTRY_OUT_HEAD.pack(ino, self._generation, valid_s, attr_s, valid_ns, attr_ns)
        return head + attr

    def _attr(self, ino: InodeNo, record: InodeRecord) -> tuple[bytes, tuple[int, int]]:
        """Return struct fuse_attr and for how long it holds (s, ns)."""
        opened = self._store.pool.open_inodes.get(ino)
        valid = (0, 0) if record.state in UNFINISHED else self._attr_valid
        if opened is not None and opened.writers:
            valid = (0, 0)
        nlink = 0 if self._store.blocks.is_gone(ino) else link_count(record)
        atime_s, atime_ns = divmod(record.atime_ns, _NS)
        mtime_s, mtime_ns = divmod(record.mtime_ns, _NS)
        ctime_s, ctime_ns = divmod(record.ctime_ns, _NS)
        attr = ATTR.pack(
            ino,
            record.size_bytes,
            record.allocated_bytes // STAT_BLOCK_BYTES,
            atime_s,
            mtime_s,
            ctime_s,
            atime_ns,
            mtime_ns,
            ctime_ns,
            record.mode,
            nlink,
            record.uid,
            record.gid,
            0,
            PAGE_BYTES,
            0,
        )
        return attr, valid

    def _open(self, unique: int, nodeid: int, request: memoryview) -> bytes | None:
        flags = OPEN_IN.unpack_from(request)[0]
        if flags & NOT_A_READER:
            return None  # it takes the whole stack
        fh, grant = self._files.open(InodeNo(nodeid), flags)
        return _pack_out(_OPEN_REPLY_BYTES, 0, unique) + OPEN_OUT.pack(
            fh, grant.open_flags, grant.backing_id
        )

    def _flush(self, unique: int, _nodeid: int, request: memoryview) -> bytes:
        self._files.flush(FLUSH_IN.unpack_from(request)[0], self._requester())
        return error_reply(unique, 0)

    def _release(self, unique: int, _nodeid: int, request: memoryview) -> bytes:
        self._files.release(RELEASE_IN.unpack_from(request)[0])
        return error_reply(unique, 0)


def _split(timeout_s: float) -> tuple[int, int]:
    """Return *timeout_s* as the kernel wants it: whole seconds and nanoseconds."""
    whole_s = int(timeout_s)
    return whole_s, int((timeout_s - whole_s) * _NS)


_CREATED_VALID: Final = _split(CREATED_S)
