"""Which block follows which when clients load: learned from the order of their opens, in arrays.

A client that loads the blocks of one prompt opens them head first, and the next time in the same
order. A *link* says which block was opened after another one. It counts once it was seen twice in
a row: in an order by chance no link does.

What a link takes is told by LINK_BYTES; a block has at most one. Two blocks may want the same place
in the table: the link that is not seen again gives way. Inode numbers are used once, so a link to
a block that is gone leads nowhere.
"""

from collections import OrderedDict, deque
from typing import Final

import numpy as np

from kvfs.core.blocks_ahead import BlocksAhead
from kvfs.core.changed import Changed, Why
from kvfs.core.types import NO_INODE, InodeNo

#: Two inode numbers and a count.
LINK_BYTES: Final = 17
#: 17 MiB, of which only what is in use takes memory: a pool of 2 TiB with blocks of 2 MiB.
LINKS_MAX: Final = 1 << 20
#: Clients whose last open is known, some 300 bytes each.
CLIENTS_MAX: Final = 1024
#: A link that was seen so often in a row counts; a further one makes it as sure as it can be.
SURE: Final = 2
_SUREST: Final = 3
#: Spreads numbers in a row over all places (Knuth).
_SPREAD: Final = 0x9E3779B97F4A7C15
_WORD: Final = (1 << 64) - 1


class _Client:
    """The last open of one client, and what it was foretold to open next."""

    __slots__ = ("foretold", "last")

    def __init__(self) -> None:
        self.last = NO_INODE
        self.foretold: deque[InodeNo] = deque()


class Chains:
    """The links of at most *links_max* blocks."""

    def __init__(self, links_max: int = LINKS_MAX) -> None:
        bits = max(1, (links_max - 1).bit_length())
        self._shift: Final = 64 - bits
        # Memoryviews, since one number is meant each time; the kernel gives pages as they are used.
        self._ino: Final = np.zeros(1 << bits, np.uint64).data
        self._next: Final = np.zeros(1 << bits, np.uint64).data
        self._seen: Final = np.zeros(1 << bits, np.uint8).data
        self._clients: OrderedDict[int, _Client] = OrderedDict()
        #: How many links there are, and may be.
        self.links = 0
        self.places: Final = 1 << bits

    def opened(self, client: int, ino: InodeNo, depth: int) -> list[InodeNo]:
        """Note that *client* opened block *ino*; return what it will open next, in that order.

        Only what it was not foretold before, and no more than the next *depth* blocks.
        """
        known = self._clients.get(client)
        if known is None:
            known = self._clients[client] = _Client()
            if len(self._clients) > CLIENTS_MAX:
                self._clients.popitem(last=False)
        else:
            self._clients.move_to_end(client)
        if known.last == ino:
            return []  # once more, as some do to read a head first
        if known.last:
            self._learn(known.last, ino)
        known.last = ino
        foretold = known.foretold
        # What it passed over it does not load any more.
        passed = foretold.index(ino) + 1 if ino in foretold else len(foretold)
        for _ in range(passed):
            foretold.popleft()
        return self._foretell(ino, foretold, depth)

    def next_of(self, ino: InodeNo) -> InodeNo:
        """Return the block that follows *ino*; NO_INODE if that is not known."""
        at = self._place(ino)
        sure = self._ino[at] == ino and self._seen[at] >= SURE
        return InodeNo(self._next[at]) if sure else NO_INODE

    def drop(self, ino: InodeNo) -> None:
        """Forget what follows *ino*, which is gone."""
        at = self._place(ino)
        if self._ino[at] == ino:
            self._ino[at] = self._next[at] = self._seen[at] = 0
            self.links -= 1

    def _foretell(self, ino: InodeNo, foretold: deque[InodeNo], depth: int) -> list[InodeNo]:
        """Add to *foretold* what follows it, or *ino*, up to *depth* blocks; return what is new."""
        new: list[InodeNo] = []
        at = foretold[-1] if foretold else ino
        while len(foretold) < depth:
            at = self.next_of(at)
            if not at or at == ino or at in foretold:  # a loop ends where it began
                break
            foretold.append(at)
            new.append(at)
        return new

    def _learn(self, before: InodeNo, ino: InodeNo) -> None:
        """Note that *ino* was opened after *before*."""
        at = self._place(before)
        seen = self._seen[at]
        if self._ino[at] == before:
            if self._next[at] == ino:
                self._seen[at] = min(seen + 1, _SUREST)
                return
        elif not self._ino[at]:
            self.links += 1
        if seen > 1:
            self._seen[at] = seen - 1
            return
        self._ino[at], self._next[at], self._seen[at] = before, ino, 1

    def _place(self, ino: InodeNo) -> int:
        return (ino * _SPREAD & _WORD) >> self._shift


class LearnedChains:
    """The chains of one pool, and the blocks read ahead by them.

    In memory only: a restart or a take-over learns anew.
    """

    follows: Final = frozenset({Why.REOPENED, Why.REPLACED, Why.REMOVED, Why.LOST, Why.EVICTED})

    def __init__(self) -> None:
        self.links: Final = Chains()
        self.ahead: Final = BlocksAhead()

    def follow(self, changed: Changed) -> None:
        """Forget a block that is gone, or is written again."""
        self.links.drop(changed.ino)
        self.ahead.drop(changed.ino)
