"""What belongs to somebody: leased blocks and slabs by their makers, orphans, spent slabs.

A published block is in none of these tables: it belongs to nobody. A lease ends with its maker's
process; one whose maker cannot be watched (a kernel thread, a foreign pid namespace, an NFS
server) ends when nobody used the block for a while. The index keeps state and maker, so that a
successor of this process finds them again.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from kvfs.lifecycle import HELD, State
from kvfs.makers import NOBODY, Maker, Makers
from kvfs.types import InodeNo, InodeRecord

#: Blocks whose maker died are settled so many a tick: a process may have made a million.
_SETTLED_A_TICK: Final = 128
_KEPT: Final = HELD | {State.ORPHAN, State.SPENT}


class Holding(NamedTuple):
    """One block in the tables."""

    state: State
    allocated_bytes: int
    maker: Maker


class Holdings:
    """The tables."""

    def __init__(self, makers: Makers, lease_s: float) -> None:
        self.makers = makers
        self._lease_s = lease_s
        #: Told each inode whose maker is gone; False if it cannot be settled yet.
        self.settle: Callable[[InodeNo], bool] = self._forget
        self._held: dict[InodeNo, Holding] = {}
        self._by_maker: dict[Maker, set[InodeNo]] = {}
        #: Leases by time: when each block was used last, oldest first.
        self._timed: OrderedDict[InodeNo, float] = OrderedDict()
        self._ended: deque[InodeNo] = deque()
        #: Whether every holding of the index is in the tables (holdings_scan.py).
        self.complete = False

    def note(self, ino: InodeNo, record: InodeRecord, now_s: float) -> None:
        """Learn what *ino* is now."""
        self.drop(ino)
        state = State(record.state)
        if state not in _KEPT:
            return
        maker = Maker(record.maker_tgid, record.maker_birth)
        self._held[ino] = Holding(state, record.allocated_bytes, maker)
        if state not in HELD:
            return
        if maker == NOBODY:
            self._timed[ino] = now_s
        elif self.makers.lives(maker):
            self._by_maker.setdefault(maker, set()).add(ino)
        else:
            self._ended.append(ino)

    def drop(self, ino: InodeNo) -> None:
        """Forget *ino*."""
        holding = self._held.pop(ino, None)
        if holding is None:
            return
        self._timed.pop(ino, None)
        made = self._by_maker.get(holding.maker)
        if made is not None:
            made.discard(ino)
            if not made:
                del self._by_maker[holding.maker]

    def touch(self, ino: InodeNo, now_s: float) -> None:
        """A block was used: a lease by time starts anew."""
        if ino in self._timed:
            self._timed[ino] = now_s
            self._timed.move_to_end(ino)

    def tick(self, now_s: float) -> None:
        """End the leases of processes that ended, and of blocks nobody used for long."""
        for maker in self.makers.ended():
            self._ended.extend(sorted(self._by_maker.pop(maker, ())))
        while self._timed:
            ino, used_s = next(iter(self._timed.items()))
            if used_s + self._lease_s > now_s:
                break
            del self._timed[ino]
            self._ended.append(ino)
        for _ in range(min(_SETTLED_A_TICK, len(self._ended))):
            ino = self._ended.popleft()
            if self._is_without_maker(ino) and not self.settle(ino):
                self._ended.append(ino)

    def _is_without_maker(self, ino: InodeNo) -> bool:
        """Whether *ino* is held still, and nobody made it anew since its maker ended."""
        holding = self._held.get(ino)
        if holding is None or holding.state not in HELD:
            return False
        return ino not in self._timed and ino not in self._by_maker.get(holding.maker, ())

    def _forget(self, ino: InodeNo) -> bool:
        self.drop(ino)
        return True

    def state_of(self, ino: InodeNo) -> State | None:
        """Return the state of *ino* if it is in the tables."""
        holding = self._held.get(ino)
        return None if holding is None else holding.state

    def rows(self) -> Iterator[tuple[InodeNo, Holding]]:
        """Yield everything in the tables."""
        return iter(self._held.items())
