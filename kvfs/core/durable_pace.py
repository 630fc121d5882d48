"""When the next blocks are made durable: late, to yield to clients, but within the window.

Pure: time is an argument.
"""

from typing import Final

#: While clients store, a block waits for this share of the window: many are removed before, and the
#: clients need the device.
_WAITS_SHARE: Final = 0.5
#: The same while nobody stores.
_IDLE_WAITS_SHARE: Final = 0.1
#: Past this share of the window the pass no longer yields to clients.
_LATE_SHARE: Final = 0.75
#: One flush serves all blocks that came due in this share of the window.
_FLUSH_SHARE: Final = 0.05
#: Stands in a goal that is not set: no ticket gets this high.
_NOT_SET: Final = 1 << 62
#: Identities that wait for attributes are queued when these are written: hence twice.
_ROUNDS: Final = 2


class Pace:
    """The pace of one drive, for a window of *within_s* seconds; 0: only on demand."""

    def __init__(self, within_s: float) -> None:
        self.within_s = within_s
        self._rests_until_s = 0.0

    def due_before_s(self, now_s: float, *, busy: bool, urgent: bool) -> float:
        """Return the time before which a block must have been published to be due now.

        *busy*: clients store. *urgent*: somebody waits, so all are due.
        """
        if urgent:
            return now_s
        share = _WAITS_SHARE if busy else _IDLE_WAITS_SHARE
        return now_s - share * self.within_s

    def is_due(self, now_s: float, since_s: float, *, busy: bool, urgent: bool) -> bool:
        """Whether the pass begins at *now_s*, when the oldest block waits since *since_s*."""
        if urgent:
            return True
        if not self.within_s or since_s > self.due_before_s(now_s, busy=busy, urgent=False):
            return False
        return now_s >= self._rests_until_s or now_s - since_s > _LATE_SHARE * self.within_s

    def note_ended(self, now_s: float, took_s: float, *, full: bool) -> None:
        """Note that a batch took *took_s*; the device is left to the clients for as long.

        A batch that was not *full* left no blocks waiting, so the next one may gather for longer.
        """
        rest_s = took_s if full else max(took_s, _FLUSH_SHARE * self.within_s)
        self._rests_until_s = now_s + rest_s

    def is_late(self, waited_s: float) -> bool:
        """Whether a block waited longer than the window."""
        return bool(self.within_s) and waited_s > self.within_s


class DurableGoal:
    """A moment up to which everything is to be durable. It is set once the list is complete."""

    __slots__ = ("attributes", "flushes", "gaps", "losses", "moves", "rounds", "ticket", "upto")

    def __init__(self, gaps: int, losses: int, moves: int) -> None:
        """*gaps* in the list must be closed first, and *moves* from memory must have ended.

        *losses* are the failures so far: if there are more at the end, not all is durable.
        """
        self.moves = moves
        self.gaps, self.losses = gaps, losses
        self.ticket = self.attributes = _NOT_SET
        #: How many flushes each drive must have had; empty: it is not set.
        self.flushes: tuple[int, ...] = ()
        #: How often what is queued has still to be written.
        self.rounds = _ROUNDS
        #: Up to which piece of work of each drive's thread; empty: that is not known yet.
        self.upto: tuple[int, ...] = ()

    @property
    def is_set(self) -> bool:
        """Whether the moment is set: before, the list is not complete."""
        return bool(self.flushes)
