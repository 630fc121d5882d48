"""The fast path of a store: CREATE and RENAME, which change the index.

Their handlers never wait, so nothing is gained by a coroutine: of the 75 us that each cost behind
libfuse, pyfuse3 and trio the store itself needed 30. What is not a plain create or rename is left
to pyfuse3.
"""

import os
import stat
import struct
from collections.abc import Callable
from typing import Final

from kvfs.core.errors import Exists, NoSpace
from kvfs.core.types import InodeNo
from mount.files.files import Files
from mount.fuse.channel import Answer, Requester
from mount.fuse.wire import (
    ENTRY_OUT_BYTES,
    OPEN_OUT,
    OUT_HEADER,
    OUT_HEADER_BYTES,
    Opcode,
    error_reply,
)
from mount.requests.fast import FastAnswers

#: struct fuse_create_in: flags, mode, umask, open_flags; the name follows.
_CREATE_IN: Final = struct.Struct("<IIII")
#: struct fuse_rename_in: newdir; both names follow.
_RENAME_IN: Final = struct.Struct("<Q")
#: struct fuse_rename2_in: newdir, flags, padding; both names follow.
_RENAME2_IN: Final = struct.Struct("<QII")
#: renameat2(2), linux/fs.h.
_RENAME_NOREPLACE: Final = 1
_CREATE_REPLY_BYTES: Final = OUT_HEADER_BYTES + ENTRY_OUT_BYTES + OPEN_OUT.size


class FastStores:
    """The two answers; both run on the trio thread and never wait."""

    def __init__(
        self,
        lane: FastAnswers,
        files: Files,
        requester: Callable[[], Requester],
        removed: Callable[[InodeNo], None],
    ) -> None:
        """*requester* tells whose request it is; *removed* hears of inodes that lost their name."""
        self._lane = lane
        self._files = files
        self._requester = requester
        self._removed = removed

    def answers(self) -> dict[int, Answer]:
        """Return the answers by opcode."""
        return {
            Opcode.CREATE: self._create,
            Opcode.RENAME: self._rename,
            Opcode.RENAME2: self._rename2,
        }

    def _create(self, unique: int, nodeid: int, request: memoryview) -> bytes | None:
        flags, mode, _, _ = _CREATE_IN.unpack_from(request)
        name = _text(request[_CREATE_IN.size :])
        who = self._requester()
        try:
            fh, grant, ino, record = self._files.create(
                InodeNo(nodeid), name, stat.S_IFREG | stat.S_IMODE(mode), flags, who.uid, who.gid
            )
        except (NoSpace, Exists) as error:
            if isinstance(error, NoSpace) and self._files.room.worth_waiting(1, 0.0):
                return None  # the handler may wait for room
            if isinstance(error, Exists) and not flags & os.O_EXCL:
                return None  # and for what was there to be forgotten
            raise
        entry = self._lane.created(ino, record, name_trusted=self._files.trusts_created(record))
        opened = OPEN_OUT.pack(fh, grant.open_flags, grant.backing_id)
        return OUT_HEADER.pack(_CREATE_REPLY_BYTES, 0, unique) + entry + opened

    def _rename(self, unique: int, nodeid: int, request: memoryview) -> bytes:
        (new_parent,) = _RENAME_IN.unpack_from(request)
        return self._move(unique, nodeid, new_parent, request[_RENAME_IN.size :], replace=True)

    def _rename2(self, unique: int, nodeid: int, request: memoryview) -> bytes | None:
        new_parent, flags, _ = _RENAME2_IN.unpack_from(request)
        if flags & ~_RENAME_NOREPLACE:
            return None
        names = request[_RENAME2_IN.size :]
        return self._move(unique, nodeid, new_parent, names, replace=not flags)

    def _move(
        self, unique: int, parent: int, new_parent: int, names: memoryview, *, replace: bool
    ) -> bytes:
        old, _, new = bytes(names).partition(b"\0")
        replaced = self._files.store.rename(
            InodeNo(parent),
            old,
            InodeNo(new_parent),
            new.rstrip(b"\0"),
            replace=replace,
            who=self._files.requester(),
        )
        if replaced is not None:
            self._removed(replaced)
        return error_reply(unique, 0)


def _text(name: memoryview) -> bytes:
    """Return a name without its terminating zero."""
    return bytes(name).partition(b"\0")[0]
