"""How much each tenant has of what may wait for a drive that seems not to answer.

A request that waits occupies a task, and what a thread does for it stays behind when it has given
up, until the drive answers. So one user's loads would take all tasks, and fill the queue that
others' wait in. Beyond a bound only those wait whose tenant has less than an equal part of it; the
one who has more is told so, and nobody else is refused for it. The last eighth is for root.
"""

from collections.abc import Callable
from typing import Final

from kvfs.core.account import ROOT, Taken
from kvfs.core.errors import TooManyWaiting

#: Tasks of pyfuse3 are twice as many (mount/serve.py), and others need some. What all tenants
#: together may leave behind by this is less than a crowd (kvfs/storage/device_thread.py).
_WAITING_MAX: Final = 128
_WAITS_BUT_ROOT: Final = 7 / 8


class DeviceShares:
    """What waits for the drives of one mount, by tenant."""

    def __init__(self, left: Taken, payer: Callable[[], int]) -> None:
        """Count in *left* the work that has not ended; *payer* tells for whom one waits now."""
        self._left: Final = left
        self._waiting: Final = Taken(left.tenants)
        self.payer: Final = payer

    def require(self, uid: int) -> None:
        """Raise TooManyWaiting if the tenant of *uid* may leave no more work to a silent drive."""
        if _is_over(self._left, uid, 1):
            raise _refusal()

    def begin_work(self, uid: int) -> Callable[[], None]:
        """Count a piece of work for *uid*; return what is to be called when it has ended."""
        self._left.count(uid, 1)
        return lambda: self._left.count(uid, -1)

    def begin_wait(self, uid: int) -> None:
        """Count a request of *uid* that waits."""
        self._waiting.count(uid, 1)

    def end_wait(self, uid: int) -> None:
        """Count one less."""
        self._waiting.count(uid, -1)

    def require_wait(self, uid: int) -> None:
        """Raise TooManyWaiting if a request of *uid* that waits is to make way for others."""
        if _is_over(self._waiting, uid, 0):
            raise _refusal()


def _refusal() -> TooManyWaiting:
    return TooManyWaiting("the device does not answer, and too many requests wait for it")


def _is_over(taken: Taken, uid: int, more: int) -> bool:
    """Whether the tenant of *uid* takes more than its part, with *more*, and all take too much."""
    bound = _WAITING_MAX * (1 if uid == ROOT else _WAITS_BUT_ROOT)
    if taken.total + more <= bound:
        return False
    own = taken.by(uid)
    return own + more > bound / (len(taken.rows()) + (own == 0))
