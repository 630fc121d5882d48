"""Requests that a task answers later, while further requests are read."""

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Final, Protocol

import trio

from kvfs.core.errors import NotAtHand
from mount.fuse.errno_map import counted_errno
from mount.fuse.wire import OUT_HEADER, OUT_HEADER_BYTES

#: Writes a reply in two parts: its header, and what follows.
ReplyLate = Callable[[bytes, bytes], None]
#: Called before a wait. The function it returns is called when the wait is over, with no checkpoint
#: from there until the caller goes on.
AboutToWait = Callable[[], Callable[[], None]]
#: Does work that lacks something of the device once that is there.
AtHand = Callable[[Callable[[], Awaitable[bytes]], AboutToWait | None], Awaitable[bytes]]


class Asker(Protocol):
    """Who made a request, as the kernel names it (mount/fuse/channel.py)."""

    @property
    def uid(self) -> int:
        """Its user."""

    @property
    def tid(self) -> int:
        """Its thread."""


#: Whose request a task answers; pyfuse3's own tasks answer the present one.
ANSWERS_FOR: Final[ContextVar[Asker | None]] = ContextVar("answers_for", default=None)


class OwedAnswers:
    """How many answers tasks of ours still owe; those tasks need trio to run them."""

    def __init__(self) -> None:
        self.number = 0
        #: Without those that wait for space, which only further requests may free.
        self.under_way = 0
        self._fewer = trio.lowlevel.ParkingLot()

    def begin(self) -> None:
        """Count one that is owed."""
        self.number += 1
        self.under_way += 1

    def end(self) -> None:
        """Count one that is given."""
        self.number -= 1
        self.under_way -= 1
        self._fewer.unpark()

    def stand_aside(self) -> Callable[[], None]:
        """Let a late answer wait for what other requests may bring; those are read meanwhile.

        Call the returned function when the wait is over.
        """
        self.under_way -= 1
        self._fewer.unpark()

        def go_on() -> None:
            self.under_way += 1

        return go_on

    async def fewer(self) -> None:
        """Wait until fewer are under way."""
        await self._fewer.park()


class Late:
    """Starts the tasks. If one fails, it answers with an errno."""

    def __init__(
        self,
        nursery: trio.Nursery,
        reply: ReplyLate,
        about_to_wait: AboutToWait | None = None,
        at_hand: AtHand | None = None,
        present: Callable[[], Asker] | None = None,
    ) -> None:
        """*about_to_wait* is called by tasks that wait for the effect of other requests.

        *at_hand* repeats work once the device has brought what it lacked (NotAtHand). *present*
        tells whose request is to be answered.
        """
        self._present: Final = present
        self._at_hand: Final = at_hand
        self._nursery: Final = nursery
        self._reply: Final = reply
        self.about_to_wait: Final = about_to_wait

    def answer(self, unique: int, work: Callable[[], Awaitable[bytes]]) -> bytes:
        """Answer request *unique* later with what *work* returns; return the mark for "later"."""
        asker = None if self._present is None else self._present()
        self._nursery.start_soon(self._finish, unique, work, asker)
        return b""

    async def _finish(
        self, unique: int, work: Callable[[], Awaitable[bytes]], asker: Asker | None
    ) -> None:
        ANSWERS_FOR.set(asker)
        code, body = 0, b""
        try:
            try:
                body = await work()
            except NotAtHand:
                if self._at_hand is None:
                    raise
                body = await self._at_hand(work, self.about_to_wait)
        except Exception as error:  # the last handler of a task, which must not end the mount
            code = counted_errno(error)
        self._reply(OUT_HEADER.pack(OUT_HEADER_BYTES + len(body), -code, unique), body)
