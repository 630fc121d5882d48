"""The lock under which pyfuse3's tasks take turns to read requests."""

import trio


class PumpLock:
    """The lock under which one of pyfuse3's tasks reads, in place of trio.Lock.

    trio's lock makes every acquire a trip through the scheduler and hands itself to the next
    task at once. Here the task that has just answered a request reads the next one; another
    takes over only when a handler says that it is about to wait (``hand_over``).
    """

    def __init__(self) -> None:
        self._held = False
        self._ending = False
        self._parked = trio.lowlevel.ParkingLot()

    async def __aenter__(self) -> None:
        while self._held:
            await self._parked.park()
        self._held = True

    async def __aexit__(self, failure: type[BaseException] | None, *_: object) -> None:
        self._held = False
        if failure is not None or self._ending:
            # The mount is gone: every other task must find out, too, or main() never ends.
            self._parked.unpark_all()

    def hand_over(self) -> None:
        """Let another task read while the caller waits."""
        self._parked.unpark()

    def end(self) -> None:
        """Let every task take the lock once more and notice the end.

        pyfuse3's tasks check for the end after each request only: the one that holds the lock now
        may leave after a last request and wake no other.
        """
        self._ending = True
        self._parked.unpark_all()
