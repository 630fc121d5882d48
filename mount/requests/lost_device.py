"""Answers after the device is lost: every name is a miss, every store is refused.

So clients go on without a cache, which is better than an error for every call. The pool is not
used: its index is a mapping of a file that cannot be read any more.
"""

import errno
import stat
from typing import Final

from kvfs.core.types import NAME_MAX_BYTES, PAGE_BYTES, ROOT_INODE, SECOND_NS, InodeRecord
from mount.fuse.channel import Answer, Message
from mount.fuse.wire import (
    ATTR,
    ATTR_OUT_HEAD,
    OPCODES,
    OPEN_OUT,
    STATFS_OUT,
    Opcode,
    data_reply,
    error_reply,
)

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


class LostDevice:
    """The answers of a mount whose root directory had the record *root*."""

    def __init__(self, root: InodeRecord) -> None:
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


def _refusing(code: int) -> Answer:
    def refuse(unique: int, _nodeid: int, _request: memoryview) -> Message:
        return error_reply(unique, code)

    return refuse


def _nothing(unique: int, _nodeid: int, _request: memoryview) -> Message:
    return data_reply(unique, b"")


def _statfs(unique: int, _nodeid: int, _request: memoryview) -> Message:
    sizes = (PAGE_BYTES, NAME_MAX_BYTES, PAGE_BYTES)
    return data_reply(unique, STATFS_OUT.pack(0, 0, 0, 0, 0, *sizes))
