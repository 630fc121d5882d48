"""Answers in bytes that libfuse and pyfuse3 do not have, so that no caller hangs.

Raw requests are those that pyfuse3 does not pass on: FALLOCATE, LSEEK, IOCTL, foreign xattrs,
COPY_FILE_RANGE, SYNCFS; and STATFS, of which it does not say the inode. Once the device is lost,
all requests are answered here. Layouts: linux/fuse.h.
"""

import errno
import os
import stat
from typing import Final

from kvfs.core.errors import NotAtHand
from kvfs.core.types import (
    NAME_MAX_BYTES,
    PAGE_BYTES,
    ROOT_INODE,
    SECOND_NS,
    InodeNo,
    InodeRecord,
)
from kvfs.engine.attributes import USER_PREFIX
from kvfs.engine.blocks.allocations import AllocationRequest
from kvfs.engine.store_figures import statfs_totals
from kvfs.storage.syscalls import FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE, FALLOC_FL_ZERO_RANGE
from mount.files.files import Files
from mount.files.handles import Handle, HandleKind
from mount.fuse.channel import Answer
from mount.fuse.late import Late
from mount.fuse.wire import (
    ATTR,
    ATTR_OUT_HEAD,
    FALLOCATE_IN,
    GETXATTR_IN,
    LSEEK_IN,
    LSEEK_OUT,
    OPCODES,
    OPEN_OUT,
    STATFS_OUT,
    Message,
    Opcode,
    data_reply,
    error_reply,
)

#: Modes that XFS, ext4 and tmpfs all have, and that change no other file.
_FALLOCATE_MODES: Final = frozenset(
    {
        0,
        FALLOC_FL_KEEP_SIZE,
        FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
        FALLOC_FL_ZERO_RANGE,
        FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE,
    }
)
#: Each is answered with one errno. After ENOSYS the kernel does it by itself and never asks again.
_REFUSED: Final = {
    Opcode.IOCTL: errno.ENOTTY,
    Opcode.COPY_FILE_RANGE: errno.ENOSYS,
    Opcode.COPY_FILE_RANGE_64: errno.ENOSYS,
    Opcode.SYNCFS: errno.ENOSYS,
    Opcode.BMAP: errno.ENOSYS,
    Opcode.POLL: errno.ENOSYS,
    Opcode.GETLK: errno.ENOSYS,
    Opcode.SETLK: errno.ENOSYS,
    Opcode.SETLKW: errno.ENOSYS,
    Opcode.SETUPMAPPING: errno.ENOSYS,
    Opcode.REMOVEMAPPING: errno.ENOSYS,
}

#: libfuse must see these, to end its session.
_LIBFUSES: Final = frozenset({Opcode.INIT, Opcode.DESTROY})
_ANSWERED: Final[dict[int, int]] = {
    Opcode.LOOKUP: errno.ENOENT,
    # The kernel looks the name up again, and finds none.
    Opcode.OPEN: errno.ESTALE,
    Opcode.GETXATTR: errno.ENODATA,
    Opcode.IOCTL: errno.ENOTTY,
    Opcode.FLUSH: 0,
    Opcode.RELEASE: 0,
    Opcode.RELEASEDIR: 0,
}


def _refusing(code: int) -> Answer:
    def refuse(unique: int, _nodeid: int, _request: memoryview) -> bytes:
        return error_reply(unique, code)

    return refuse


class RawRequests:
    """Answers what libfuse and pyfuse3 would fail or not understand.

    If one raises an exception, the channel answers with its errno.
    """

    def __init__(self, files: Files, late: Late) -> None:
        self._store = files.store
        self._callers = files.callers
        self._held = files.held
        self._room = files.room
        self._handles = files.handles
        self._late = late

    def answers(self) -> dict[int, Answer]:
        """Return the answers by opcode; 0 stands for every opcode that is not known here."""
        table: dict[int, Answer] = {opcode: _refusing(code) for opcode, code in _REFUSED.items()}
        for unknown in set(range(OPCODES)) - {int(opcode) for opcode in Opcode}:
            table[unknown] = _refusing(errno.ENOSYS)
        table[Opcode.GETXATTR] = self._getxattr
        table[Opcode.FALLOCATE] = self._fallocate
        table[Opcode.LSEEK] = self._lseek
        table[Opcode.STATFS] = self._statfs
        return table

    def _getxattr(self, unique: int, _nodeid: int, request: memoryview) -> bytes | None:
        """Say "not set" for every namespace but user.*: the kernel asks on every first write."""
        name = bytes(request[GETXATTR_IN.size : GETXATTR_IN.size + len(USER_PREFIX)])
        return None if name == USER_PREFIX else error_reply(unique, errno.ENODATA)

    def _statfs(self, unique: int, nodeid: int, _request: memoryview) -> Message:
        """Return the pool's size in units of 4096 bytes (LMCache takes f_bsize as alignment)."""
        totals = statfs_totals(self._store.pool, self._callers.uid(), InodeNo(nodeid))
        free, sizes = totals.blocks_free, (PAGE_BYTES, NAME_MAX_BYTES, PAGE_BYTES)
        return data_reply(
            unique,
            STATFS_OUT.pack(totals.blocks, free, free, totals.inodes, totals.inodes_free, *sizes),
        )

    def _fallocate(self, unique: int, _nodeid: int, request: memoryview) -> bytes:
        fh, offset_bytes, length_bytes, mode, _ = FALLOCATE_IN.unpack_from(request)
        handle = self._handles.get(fh)
        if handle.kind is not HandleKind.WRITER:
            return error_reply(unique, errno.EBADF)
        if mode not in _FALLOCATE_MODES:
            return error_reply(unique, errno.EOPNOTSUPP)
        return self._late.answer(
            unique, lambda: self._allocate(handle, mode, offset_bytes, length_bytes)
        )

    async def _allocate(
        self, handle: Handle, mode: int, offset_bytes: int, length_bytes: int
    ) -> bytes:
        wanted = AllocationRequest(mode, offset_bytes, length_bytes)
        wait = self._late.about_to_wait
        lacking_bytes = self._store.blocks.allocations.growth_bytes(handle.opened, wanted)
        self._held.require_growth(handle, lacking_bytes)
        await self._room.allocate(handle.opened, wanted, wait, self._held.payer(handle))
        return b""

    def _lseek(self, unique: int, _nodeid: int, request: memoryview) -> bytes:
        """SEEK_DATA and SEEK_HOLE; the kernel does the other three itself."""
        fh, offset_bytes, whence, _ = LSEEK_IN.unpack_from(request)
        try:
            return data_reply(unique, self._seek(fh, offset_bytes, whence))
        except OSError as error:  # ENXIO: no data, or no hole, follows
            return error_reply(unique, error.errno or errno.EIO)
        except NotAtHand:
            # Not to libfuse: after its ENOSYS the kernel would never ask again.
            return self._late.answer(unique, lambda: self._seek_late(fh, offset_bytes, whence))

    async def _seek_late(self, fh: int, offset_bytes: int, whence: int) -> bytes:
        return self._seek(fh, offset_bytes, whence)

    def _seek(self, fh: int, offset_bytes: int, whence: int) -> bytes:
        """Return the answer to an LSEEK. Raises NotAtHand, OSError."""
        handle = self._handles.get(fh)
        opened, syscalls = handle.opened, self._store.pool.syscalls
        fd = self._store.blocks.extent_fd(opened)
        size_bytes = syscalls.fstat(fd).st_size
        if offset_bytes >= size_bytes:  # also a negative one, which arrives as a large one
            raise OSError(errno.ENXIO, "beyond the end")
        if opened.writers and not handle.backing_id:
            # Bytes that a writer stored through a mapping may be in the kernel only, where the
            # extent has a hole. So all is data while a writer's handle, or its mapping, exists.
            found_bytes = offset_bytes if whence == os.SEEK_DATA else size_bytes
        else:
            found_bytes = syscalls.lseek(fd, offset_bytes, whence)
        return LSEEK_OUT.pack(found_bytes)


class LostDevice:
    """The answers after the device is lost: every name is a miss, every store is refused.

    So clients go on without a cache, which is better than an error for every call. The pool is not
    used: its index is a mapping of a file that cannot be read any more.
    """

    def __init__(self, root: InodeRecord) -> None:
        """*root* was the record of the root directory."""
        times = (root.mtime_ns // SECOND_NS,) * 3
        mode = stat.S_IFDIR | stat.S_IMODE(root.mode)
        owner = (root.uid, root.gid)
        attr = ATTR.pack(ROOT_INODE, 0, 0, *times, 0, 0, 0, mode, 2, *owner, 0, PAGE_BYTES, 0)
        self._root: Final = ATTR_OUT_HEAD.pack(1, 0, 0) + attr

    def answers(self) -> dict[int, Answer]:
        """Return an answer for every opcode but those that belong to libfuse."""
        table = {code: _refusing(_ANSWERED.get(code, errno.EIO)) for code in range(OPCODES)}
        table[Opcode.GETATTR] = self._getattr
        table[Opcode.OPENDIR] = self._opendir
        table[Opcode.READDIR] = table[Opcode.READDIRPLUS] = table[Opcode.LISTXATTR] = _nothing
        table[Opcode.STATFS] = _statfs
        return {code: answer for code, answer in table.items() if code not in _LIBFUSES}

    def _getattr(self, unique: int, nodeid: int, _request: memoryview) -> Message:
        if nodeid != ROOT_INODE:
            return error_reply(unique, errno.ESTALE)
        return data_reply(unique, self._root)

    def _opendir(self, unique: int, nodeid: int, _request: memoryview) -> Message:
        if nodeid != ROOT_INODE:
            return error_reply(unique, errno.ESTALE)
        return data_reply(unique, OPEN_OUT.pack(0, 0, 0))


def _nothing(unique: int, _nodeid: int, _request: memoryview) -> Message:
    return data_reply(unique, b"")


def _statfs(unique: int, _nodeid: int, _request: memoryview) -> Message:
    sizes = (PAGE_BYTES, NAME_MAX_BYTES, PAGE_BYTES)
    return data_reply(unique, STATFS_OUT.pack(0, 0, 0, 0, 0, *sizes))
