"""The fast path: requests that never wait are answered in bytes as soon as they are read.

These are LOOKUP, GETATTR, OPEN for reading, FLUSH, RELEASE, CREATE, TMPFILE and RENAME, and the
opens and closes of directories, of which a file server makes two for each block that it stores.
They need no coroutine: a CREATE through libfuse, pyfuse3 and trio took 75 us, of which the store
itself needed 30. Requests that may have to wait are left to pyfuse3, which gets the same
``answers`` as objects.
"""

import struct
from typing import Final

from kvfs.core.types import NO_BACKING_ID, PAGE_BYTES, SECOND_NS, STAT_BLOCK_BYTES, InodeNo
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
    STATX_BASIC_AND_BTIME,
    STATX_OUT,
    Opcode,
    data_reply,
)
from mount.requests.answers import Answers, Created, Entry, Validity

#: struct fuse_create_in: flags, mode, umask, open_flags; the name follows.
_CREATE_IN: Final = struct.Struct("<IIII")
#: struct fuse_rename_in: newdir; both names follow.
_RENAME_IN: Final = struct.Struct("<Q")
#: struct fuse_rename2_in: newdir, flags, padding; both names follow.
_RENAME2_IN: Final = struct.Struct("<QII")
_OPEN_REPLY_BYTES: Final = OUT_HEADER_BYTES + OPEN_OUT.size
_ATTR_REPLY_BYTES: Final = OUT_HEADER_BYTES + ATTR_OUT_HEAD.size + ATTR.size
_ENTRY_REPLY_BYTES: Final = OUT_HEADER_BYTES + ENTRY_OUT_BYTES
_CREATE_REPLY_BYTES: Final = _ENTRY_REPLY_BYTES + OPEN_OUT.size
_NO_ATTR: Final = bytes(ATTR.size)
_pack_out = OUT_HEADER.pack


def _created(unique: int, made: Created) -> bytes:
    fh, grant, entry = made
    opened = OPEN_OUT.pack(fh, grant.open_flags, grant.backing_id)
    return _pack_out(_CREATE_REPLY_BYTES, 0, unique) + entry_out(entry) + opened


def entry_out(entry: Entry) -> bytes:
    """Return *entry* as struct fuse_entry_out."""
    ino, _, _, (_, attr_s, attr_ns), generation, (_, valid_s, valid_ns) = entry
    return ENTRY_OUT_HEAD.pack(ino, generation, valid_s, attr_s, valid_ns, attr_ns) + _attr(entry)


def _attr(entry: Entry) -> bytes:
    """Return *entry* as struct fuse_attr."""
    ino, record, links, _, _, _ = entry
    # All at once, because access by name takes twice as long.
    mode, uid, gid, _, size_bytes, allocated_bytes, atime_ns, mtime_ns, ctime_ns = record[:9]
    atime_s, atime_ns = divmod(atime_ns, SECOND_NS)
    mtime_s, mtime_ns = divmod(mtime_ns, SECOND_NS)
    ctime_s, ctime_ns = divmod(ctime_ns, SECOND_NS)
    return ATTR.pack(
        ino,
        size_bytes,
        allocated_bytes // STAT_BLOCK_BYTES,
        atime_s,
        mtime_s,
        ctime_s,
        atime_ns,
        mtime_ns,
        ctime_ns,
        mode,
        links,
        uid,
        gid,
        0,
        PAGE_BYTES,
        0,
    )


class FastAnswers:
    """The answers of the fast path; all run on the trio thread and never wait.

    If one raises an exception, the channel answers with its errno.
    """

    def __init__(self, answers: Answers, files: Files) -> None:
        self._answers = answers
        self._files = files

    def answers(self) -> dict[int, Answer]:
        """Return the answers by opcode."""
        return {
            Opcode.LOOKUP: self._lookup,
            Opcode.GETATTR: self._getattr,
            Opcode.STATX: self._statx,
            Opcode.OPEN: self._open,
            Opcode.FLUSH: self._flush,
            Opcode.RELEASE: self._release,
            Opcode.OPENDIR: self._opendir,
            Opcode.RELEASEDIR: self._releasedir,
            Opcode.CREATE: self._create,
            Opcode.TMPFILE: self._tmpfile,
            Opcode.RENAME: self._rename,
            Opcode.RENAME2: self._rename2,
        }

    def _lookup(self, unique: int, nodeid: InodeNo, request: memoryview) -> bytes:
        found = self._answers.lookup(nodeid, bytes(request[:-1]))
        if isinstance(found, Validity):  # there is no such name
            head = ENTRY_OUT_HEAD.pack(0, 0, found.whole_s, 0, found.rest_ns, 0)
            return _pack_out(_ENTRY_REPLY_BYTES, 0, unique) + head + _NO_ATTR
        return _pack_out(_ENTRY_REPLY_BYTES, 0, unique) + entry_out(found)

    def _getattr(self, unique: int, nodeid: InodeNo, _request: memoryview) -> bytes:
        entry = self._answers.attributes(nodeid)
        _, attr_s, attr_ns = entry[3]
        head = ATTR_OUT_HEAD.pack(attr_s, attr_ns, 0)
        return _pack_out(_ATTR_REPLY_BYTES, 0, unique) + head + _attr(entry)

    def _statx(self, unique: int, nodeid: InodeNo, _request: memoryview) -> bytes:
        """Return the attributes with the birth time; sent only for callers that want that."""
        ino, record, links, (_, attr_s, attr_ns), _, _ = self._answers.attributes(nodeid)
        return data_reply(
            unique,
            STATX_OUT.pack(
                attr_s,
                attr_ns,
                0,
                STATX_BASIC_AND_BTIME,
                PAGE_BYTES,
                0,
                links,
                record.uid,
                record.gid,
                record.mode,
                ino,
                record.size_bytes,
                record.allocated_bytes // STAT_BLOCK_BYTES,
                0,
                *divmod(record.atime_ns, SECOND_NS),
                *divmod(record.btime_ns, SECOND_NS),
                *divmod(record.ctime_ns, SECOND_NS),
                *divmod(record.mtime_ns, SECOND_NS),
            ),
        )

    def _open(self, unique: int, nodeid: InodeNo, request: memoryview) -> bytes | None:
        flags = OPEN_IN.unpack_from(request)[0]
        if flags & NOT_A_READER or self._files.store.verifier.is_due(nodeid):
            return None  # libfuse and pyfuse3 take it
        fh, grant = self._files.open(nodeid, flags)
        return _pack_out(_OPEN_REPLY_BYTES, 0, unique) + OPEN_OUT.pack(
            fh, grant.open_flags, grant.backing_id
        )

    def _flush(self, unique: int, _nodeid: int, request: memoryview) -> bytes:
        self._files.flush(FLUSH_IN.unpack_from(request)[0], self._files.thread())
        return _pack_out(OUT_HEADER_BYTES, 0, unique)

    def _release(self, unique: int, _nodeid: int, request: memoryview) -> bytes:
        self._files.release(RELEASE_IN.unpack_from(request)[0])
        return _pack_out(OUT_HEADER_BYTES, 0, unique)

    def _opendir(self, unique: int, nodeid: InodeNo, _request: memoryview) -> bytes:
        fh = self._answers.open_directory(nodeid)
        return _pack_out(_OPEN_REPLY_BYTES, 0, unique) + OPEN_OUT.pack(fh, 0, NO_BACKING_ID)

    def _releasedir(self, unique: int, _nodeid: int, request: memoryview) -> bytes:
        self._answers.close_directory(RELEASE_IN.unpack_from(request)[0])
        return _pack_out(OUT_HEADER_BYTES, 0, unique)

    def _create(self, unique: int, nodeid: InodeNo, request: memoryview) -> bytes | None:
        flags, mode, _, _ = _CREATE_IN.unpack_from(request)
        name = bytes(request[_CREATE_IN.size :]).partition(b"\0")[0]
        made = self._answers.create_at_once(nodeid, name, mode, flags)
        return None if made is None else _created(unique, made)

    def _tmpfile(self, unique: int, nodeid: InodeNo, request: memoryview) -> bytes | None:
        flags, mode, _, _ = _CREATE_IN.unpack_from(request)
        made = self._answers.create_nameless_at_once(nodeid, mode, flags)
        return None if made is None else _created(unique, made)

    def _rename(self, unique: int, nodeid: InodeNo, request: memoryview) -> bytes:
        (new_parent,) = _RENAME_IN.unpack_from(request)
        return self._move(unique, nodeid, new_parent, request[_RENAME_IN.size :], 0)

    def _rename2(self, unique: int, nodeid: InodeNo, request: memoryview) -> bytes:
        new_parent, flags, _ = _RENAME2_IN.unpack_from(request)
        return self._move(unique, nodeid, new_parent, request[_RENAME2_IN.size :], flags)

    def _move(
        self, unique: int, parent: InodeNo, new_parent: int, names: memoryview, flags: int
    ) -> bytes:
        old, _, new = bytes(names).partition(b"\0")
        new = new.rstrip(b"\0")
        self._answers.rename(parent, old, InodeNo(new_parent), new, flags)
        return _pack_out(OUT_HEADER_BYTES, 0, unique)
