"""Requests that a task answers later, while further requests are read."""

from collections.abc import Awaitable, Callable
from typing import Final

import trio

from mount.files.space_wait import AboutToWait
from mount.fuse.errno_map import counted_errno
from mount.fuse.wire import OUT_HEADER, OUT_HEADER_BYTES

#: Writes a reply in two parts: its header, and what follows.
ReplyLate = Callable[[bytes, bytes], None]


class Late:
    """Starts the tasks; an errno is the answer of one that fails."""

    def __init__(
        self,
        nursery: trio.Nursery,
        reply: ReplyLate,
        about_to_wait: AboutToWait | None = None,
    ) -> None:
        """*about_to_wait* is for tasks that wait for what other requests bring about."""
        self._nursery: Final = nursery
        self._reply: Final = reply
        self.about_to_wait: Final = about_to_wait

    def answer(self, unique: int, work: Callable[[], Awaitable[bytes]]) -> bytes:
        """Answer request *unique* with what *work* will return; returns what says so."""
        self._nursery.start_soon(self._finish, unique, work)
        return b""

    async def _finish(self, unique: int, work: Callable[[], Awaitable[bytes]]) -> None:
        code, body = 0, b""
        try:
            body = await work()
        except Exception as error:  # a task's own door: it must not end the mount
            code = counted_errno(error)
        self._reply(OUT_HEADER.pack(OUT_HEADER_BYTES + len(body), -code, unique), body)
