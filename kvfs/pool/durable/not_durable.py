"""Published blocks that the device may not have yet; oldest first.

A power loss would lose them. The durability pass (engine/durability/) makes their bytes durable,
and only then writes their identity. Each is also in shared memory (outliving.py), so that the list,
with its ages, outlives a server. The list may be incomplete: it is bounded, and shared memory is
lost if the supervisor dies with its server. Then a search of the index completes it, and a sync of
everything waits for that search first (``gaps``). All other blocks have their identity.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final, NamedTuple

from kvfs.core.drives import ByDrive
from kvfs.core.types import InodeNo
from kvfs.storage.outliving import Lacks, UndurableRow, UndurableTable


class Waiting(NamedTuple):
    """A block that waits: since when (monotonic), its size, and the number of its publishing."""

    since_s: float
    size_bytes: int
    ticket: int


class UndurableQueue:
    """The blocks of one drive. Each is in one of four tables, each oldest first."""

    def __init__(self) -> None:
        self._waiting: dict[InodeNo, Waiting] = {}
        #: Taken by the pass, which is writing their bytes to the device.
        self._taken: dict[InodeNo, Waiting] = {}
        #: Put aside: they may still be written, through a mapping or a handle that is never closed.
        self._held: dict[InodeNo, Waiting] = {}
        #: With an identity that is written, and not durable yet.
        self._identified: dict[InodeNo, Waiting] = {}
        self._tables: Final = (self._waiting, self._taken, self._held, self._identified)

    def __len__(self) -> int:
        """Return how many are listed, held ones included."""
        return sum(map(len, self._tables))

    def __contains__(self, ino: InodeNo) -> bool:
        """Whether *ino* is listed and has no identity yet."""
        return ino in self._waiting or ino in self._taken or ino in self._held

    @property
    def held(self) -> int:
        """How many are put aside because they may still be written."""
        return len(self._held)

    @property
    def waiting(self) -> int:
        """How many the pass has not taken yet; those put aside do not count."""
        return len(self._waiting)

    def oldest_since_s(self) -> float | None:
        """Return since when the oldest block waits, held ones aside; None: none does."""
        tables = (self._waiting, self._taken, self._identified)
        return min((next(iter(table.values())).since_s for table in tables if table), default=None)

    def put(self, ino: InodeNo, waiting: Waiting) -> None:
        """Let *ino* wait."""
        self._waiting[ino] = waiting

    def take_off(self, ino: InodeNo) -> Waiting | None:
        """Take *ino* off; return what was said of it, None if it was not listed."""
        for table in self._tables:
            waiting = table.pop(ino, None)
            if waiting is not None:
                return waiting
        return None

    # ---- the pass ----

    def next_due(self) -> tuple[InodeNo, Waiting] | None:
        """Return the block that the pass should take next, None if none waits."""
        return next(iter(self._waiting.items()), None)

    def begin(self, ino: InodeNo) -> None:
        """Note that the pass has begun to make *ino* durable."""
        self._taken[ino] = self._waiting.pop(ino)

    def hold(self, ino: InodeNo) -> None:
        """Put *ino* aside, because somebody may still write it."""
        self._held[ino] = self._waiting.pop(ino)

    def look_again(self, count: int) -> None:
        """Let up to *count* held blocks wait again, those held longest first."""
        for ino in list(self._held)[:count]:
            self._waiting[ino] = self._held.pop(ino)

    def is_taken(self, ino: InodeNo, waiting: Waiting) -> bool:
        """Whether *ino* was not published anew, written or removed since it was taken."""
        return self._taken.get(ino) is waiting

    def put_back(self, ino: InodeNo) -> None:
        """Let *ino*, which was taken, wait again."""
        self._waiting[ino] = self._taken.pop(ino)

    def note_identified(self, ino: InodeNo) -> None:
        """Note that the identity of *ino*, which was taken, is written."""
        self._identified[ino] = self._taken.pop(ino)

    def is_identified(self, ino: InodeNo, waiting: Waiting) -> bool:
        """Whether *ino* was not removed, or written again, since its identity was written."""
        return self._identified.get(ino) is waiting

    def identified(self) -> list[tuple[InodeNo, Waiting]]:
        """Return the blocks whose identity is written and not durable yet."""
        return list(self._identified.items())

    def first_identified_since_s(self) -> float | None:
        """Return since when the first of the identified blocks waits; None: there is none."""
        return next((waiting.since_s for waiting in self._identified.values()), None)

    # ---- everybody else ----

    def listed(self) -> Iterator[tuple[InodeNo, Waiting]]:
        """Yield all blocks; the list must not change meanwhile."""
        for table in self._tables:
            yield from table.items()

    def held_inos(self) -> Iterator[InodeNo]:
        """Yield the blocks that may still be written; the list must not change meanwhile."""
        yield from self._held

    def unidentified(self) -> Iterator[tuple[InodeNo, Waiting]]:
        """Yield all blocks without an identity; the list must not change meanwhile."""
        for table in (self._waiting, self._taken, self._held):
            yield from table.items()

    def undone(self, ticket: int) -> Iterator[InodeNo]:
        """Yield the blocks with a ticket up to *ticket* that the pass will make durable."""
        for table in (self._waiting, self._taken, self._identified):
            for ino, waiting in table.items():
                if waiting.ticket <= ticket:
                    yield ino


class UndurableBlocks:
    """The blocks of one pool: a queue for each drive, whose pass takes from no other."""

    def __init__(self, most: int, memory: UndurableTable, drives: int = 1) -> None:
        """*most*: how many blocks may be listed at once. *memory* outlives this server."""
        self._most = most
        self._memory = memory
        self.queues: Final = ByDrive([UndurableQueue() for _ in range(drives)])
        self._of: Final = self.queues.of
        #: How many may wait for each drive: one that does not answer leaves the others their part.
        self._most_there: Final = most // drives
        self.ticket = 0
        self.size_bytes = 0
        #: How many were left out so far because the list was full.
        self.left_out = 0
        #: How often the list became incomplete, and how many of these gaps were closed by a search
        #: that began later.
        self.gaps = self.closed_gaps = 0
        #: Searches that failed, so that the list stays incomplete.
        self.failed_searches = 0

    def __len__(self) -> int:
        """Return how many are listed, held ones included."""
        return sum(map(len, self.queues.all))

    def __contains__(self, ino: InodeNo) -> bool:
        """Whether *ino* is listed and has no identity yet."""
        return ino in self._of(ino)

    @property
    def held(self) -> int:
        """How many are put aside because they may still be written."""
        return sum(queue.held for queue in self.queues.all)

    @property
    def has_room(self) -> bool:
        """Whether at least half of the list is free."""
        return 2 * len(self) <= self._most

    def oldest_since_s(self) -> float | None:
        """Return since when the oldest block waits, held ones aside; None: none does."""
        oldest = (queue.oldest_since_s() for queue in self.queues.all)
        return min((since_s for since_s in oldest if since_s is not None), default=None)

    def add(self, ino: InodeNo, size_bytes: int, now_s: float) -> None:
        """List *ino*, which was published; if it is listed already, it keeps age and ticket."""
        before = self._take_off(ino)
        if self._of(ino).waiting >= self._most_there:
            self.left_out += 1
            self.note_gap()
            self._memory.drop(Lacks.BYTES, ino)
            return
        if before is None:
            self._list(ino, now_s, size_bytes)
        else:  # with its ticket, so that those who wait for it go on waiting
            self._list(ino, before.since_s, size_bytes, before.ticket)

    def _list(self, ino: InodeNo, since_s: float, size_bytes: int, ticket: int = 0) -> None:
        if not ticket:
            self.ticket = ticket = self.ticket + 1
        self._of(ino).put(ino, Waiting(since_s, size_bytes, ticket))
        self.size_bytes += size_bytes
        self._memory.put(Lacks.BYTES, ino, since_s, size_bytes)

    def remove(self, ino: InodeNo) -> None:
        """Take *ino* off the list: it is gone, durable, or being written again."""
        if self._take_off(ino) is not None:
            self._memory.drop(Lacks.BYTES, ino)

    def _take_off(self, ino: InodeNo) -> Waiting | None:
        waiting = self._of(ino).take_off(ino)
        if waiting is not None:
            self.size_bytes -= waiting.size_bytes
        return waiting

    # ---- what the list may lack ----

    def recall(self, rows: Iterable[UndurableRow]) -> None:
        """List what the last server had listed, oldest first, with its age."""
        for row in rows:
            self._list(row.ino, row.since_s, row.size_bytes)

    @property
    def is_complete(self) -> bool:
        """Whether every block without an identity is listed."""
        return self.closed_gaps == self.gaps

    def note_gap(self) -> None:
        """Note that a block without an identity may be missing from the list from now on."""
        self.gaps += 1
        self._memory.lacks_rows(lacking=True)

    def close_gaps(self, upto: int) -> None:
        """Note that a search has listed all that was missing when ``gaps`` was *upto*."""
        self.closed_gaps = max(self.closed_gaps, upto)
        self._memory.lacks_rows(lacking=not self.is_complete)

    # ---- the pass ----

    def leave(self, ino: InodeNo, waiting: Waiting) -> bool:
        """Take *ino*, an identified block that is durable now, off the list.

        False if it was removed, or written again, since *waiting*.
        """
        if not self._of(ino).is_identified(ino, waiting):
            return False
        self.remove(ino)
        return True

    def forget_identified(self) -> None:
        """Take all identified blocks off the list: a sync made them durable."""
        for queue in self.queues.all:
            for ino, _ in queue.identified():
                self.remove(ino)

    # ---- everybody else ----

    def sizes(self) -> Iterator[tuple[InodeNo, int]]:
        """Yield all listed blocks with their sizes; the list must not change meanwhile."""
        for queue in self.queues.all:
            for ino, waiting in queue.listed():
                yield ino, waiting.size_bytes

    def held_inos(self) -> Iterator[InodeNo]:
        """Yield the blocks that may still be written; the list must not change meanwhile."""
        return chain.from_iterable(queue.held_inos() for queue in self.queues.all)

    def unidentified(self) -> Iterator[tuple[InodeNo, Waiting]]:
        """Yield all blocks without an identity; the list must not change meanwhile."""
        return chain.from_iterable(queue.unidentified() for queue in self.queues.all)

    def undone(self, ticket: int) -> Iterator[InodeNo]:
        """Yield the blocks with a ticket up to *ticket* that the pass will make durable."""
        return chain.from_iterable(queue.undone(ticket) for queue in self.queues.all)
