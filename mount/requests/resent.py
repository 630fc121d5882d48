"""Answers to resent requests that the last server carried out: they must not be done twice.

What it did is known from the journal (names) and from the handle table (opens and closes). A
request that neither knows was not done, and is done now.
"""

import contextlib
import errno
import os
from typing import Final

from kvfs.core.errors import KvfsError
from kvfs.core.types import InodeNo
from kvfs.storage.journal import RESENT
from mount.files.files import Files
from mount.files.handles import Handle, HandleKind, Recalled
from mount.fuse.late import Late
from mount.fuse.wire import (
    IN_HEADER,
    IN_HEADER_BYTES,
    OPEN_IN,
    OPEN_OUT,
    Opcode,
    data_reply,
    error_reply,
)
from mount.requests.answers import Answers
from mount.requests.fast import entry_out

#: Answered with success alone.
_SILENT: Final = frozenset(
    {
        Opcode.UNLINK,
        Opcode.RMDIR,
        Opcode.RENAME,
        Opcode.RENAME2,
        Opcode.SETXATTR,
        Opcode.REMOVEXATTR,
    }
)
_MAKES: Final = frozenset({Opcode.MKDIR, Opcode.MKNOD, Opcode.SYMLINK, Opcode.LINK})
_OPENS: Final = frozenset({Opcode.OPEN, Opcode.OPENDIR})
_CLOSES: Final = frozenset({Opcode.RELEASE, Opcode.RELEASEDIR})


class ResentAnswers:
    """The answers, for as long as the requests of the last server come."""

    def __init__(
        self,
        answers: Answers,
        files: Files,
        done: dict[int, InodeNo],
        recalled: Recalled,
        late: Late,
    ) -> None:
        """*done*: requests and the inode of each; *recalled*: what is known of handles.

        *late* answers the opens that have to wait for the device.
        """
        self._answers = answers
        self._files = files
        self._done = done
        self._recalled = recalled
        self._late = late

    def of(self, message: bytes) -> bytes | None:
        """Return the whole reply to the request in *message*, None if it was not done.

        It is empty if the request is answered later.
        """
        _, code, unique, _, uid, _, tid, _, _ = IN_HEADER.unpack_from(message)
        number = unique & ~RESENT
        handle = self._recalled.by_request.get(number)
        if code in _CLOSES:
            if handle is None and number not in self._recalled.closed:
                return None
            return error_reply(unique, 0)
        if code == Opcode.OPEN and self._is_refused(message):
            return error_reply(unique, errno.ESTALE)
        if code in _OPENS:
            return None if handle is None else self._opened(unique, b"", handle, uid, tid)
        if code == Opcode.CREATE and handle is not None:
            # Without a handle nobody has the draft open: it was dropped, and is created anew.
            entry = self._entry(handle.opened.ino)
            return None if entry is None else self._opened(unique, entry, handle, uid, tid)
        if code == Opcode.TMPFILE and handle is not None:
            with contextlib.suppress(KvfsError):
                entry = entry_out(self._answers.made_nameless(handle.opened.ino))
                return self._opened(unique, entry, handle, uid, tid)
            return None
        if number not in self._done:
            return None
        if code in _SILENT:
            return error_reply(unique, 0)
        entry = self._entry(self._done[number]) if code in _MAKES else None
        return None if entry is None else data_reply(unique, entry)

    def _is_refused(self, message: bytes) -> bool:
        """Whether this OPEN to truncate was answered ESTALE: a resent one is no second try."""
        _, _, _, ino, _, _, tid, _, _ = IN_HEADER.unpack_from(message)
        if not OPEN_IN.unpack_from(message, IN_HEADER_BYTES)[0] & os.O_TRUNC:
            return False
        refused = self._files.store.blocks.truncating.refusals.get(tid)
        return refused is not None and refused.ino == ino and refused.led_to is None

    def _opened(self, unique: int, entry: bytes, handle: Handle, uid: int, tid: int) -> bytes:
        """Answer *unique* with *entry* and struct fuse_open_out of *handle*; b"": later.

        First comes what the last server had yet to do for it.
        """
        files = self._files
        if handle.kind is HandleKind.DIRECTORY:
            return data_reply(unique, entry + OPEN_OUT.pack(handle.fh, 0, 0))
        if handle.kind is HandleKind.WRITER and not handle.tid:
            files.own_again(handle, uid, tid)

        def answered() -> bytes:
            return entry + OPEN_OUT.pack(handle.fh, *files.granted_again(handle))

        async def settled() -> bytes:
            await files.settle_rewrite(handle.fh, self._late.about_to_wait)
            return answered()

        if files.store.blocks.publishing.must_forget(handle.opened):
            return self._late.answer(unique, settled)
        return data_reply(unique, answered())

    def _entry(self, ino: InodeNo) -> bytes | None:
        """Return *ino*'s entry; None if it was removed meanwhile."""
        with contextlib.suppress(KvfsError):
            return entry_out(self._answers.made(ino))
        return None
