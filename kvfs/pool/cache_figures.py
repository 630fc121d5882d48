"""The cache's own figures: hits, misses, stores and evictions, as `kvfs status` shows them.

A hit is an open for reading. The kernel sends every open, even of a cached name. Reads are not seen
(passthrough), so a hit counts as a load of the whole block. looks.py says what a miss is.
"""

from collections.abc import Callable
from stat import S_ISDIR, S_ISREG
from typing import Any, Final

from kvfs.core.changed import Changed, Why
from kvfs.core.eviction_reason import Reason, reason_for
from kvfs.core.latency import RecentLatency
from kvfs.core.lifecycle import UNFINISHED, State, is_temporary
from kvfs.core.settings import Settings
from kvfs.core.types import SECOND_NS, InodeNo, InodeRecord
from kvfs.pool.events import Events, Kind
from kvfs.pool.looks import A_TICK, Looks
from kvfs.pool.reuse_watch import NOT_FOLLOWED, ReuseWatch
from kvfs.pool.space import Space
from kvfs.pool.tallies import Tallies, Tally
from kvfs.storage.index import Index

#: A last close in one of these states stores a block, if its name is final.
_STORED_FROM: Final = UNFINISHED | {State.RENAMED, State.REWRITE}
#: In these states a block is not stored yet: the rename that follows stores it.
_NOT_FINAL: Final = frozenset({State.UNRENAMED, State.ORPHAN})


class CacheFigures:
    """The figures of one pool since its server started."""

    follows: Final = frozenset(
        {Why.CLOSED, Why.RENAMED, Why.RESTORED, Why.REMOVED, Why.LOST, Why.EVICTED}
    )

    def __init__(
        self,
        index: Index,
        settings: Settings,
        space: Space,
        monotonic_s: Callable[[], float],
        clock_ns: Callable[[], int],
        unused_ns: Callable[[InodeNo], int],
    ) -> None:
        """*clock_ns*: the clock of records. *unused_ns* returns how long a block was unused."""
        self._unused_ns: Final = unused_ns
        self._monotonic_s: Final = monotonic_s
        self._clock_ns: Final = clock_ns
        self._started_s: Final = monotonic_s()
        self.tallies: Final = Tallies(index, settings.cache_directories_max)
        self.reuse: Final = ReuseWatch(space.capacity_bytes)
        self.looks: Final = Looks(monotonic_s, self._missed, self.reuse.was_evicted)
        #: The times from CREATE until a block is stored.
        self.store_times: Final = RecentLatency()
        self.events: Final = Events(index, clock_ns)
        #: Hits and misses that ``reuse`` was told of.
        self._references = 0
        self._evicted_blocks = dict.fromkeys(Reason, 0)
        self._evicted_bytes = dict.fromkeys(Reason, 0)

    def follow(self, changed: Changed) -> None:
        """Count what was stored, removed or evicted."""
        before, after, why = changed.before, changed.after, changed.why
        if before is None:
            if after is not None and not is_temporary(after.name):
                self.stored(after)
        elif why is Why.EVICTED:
            self.evicted(before, changed.reason, self._unused_ns(changed.ino))
        elif after is None:
            self.removed(before)
        elif S_ISDIR(after.mode):
            self.tallies.tree_changed()
            self.events.tree_changed()
        elif why is Why.CLOSED:
            self.closed(before, after)
        elif S_ISREG(after.mode):
            self.renamed(before, after)

    def loaded(self, record: InodeRecord) -> None:
        """The block with *record* was opened for reading."""
        if record.state not in UNFINISHED:
            tally = self.tallies.of(record.parent, record.name)
            tally.hits += 1
            tally.loaded_bytes += record.size_bytes
            if (followed := self.reuse.followed(record)) != NOT_FOLLOWED:
                self.reuse.loaded(followed)

    def tally_of(self, record: InodeRecord) -> Tally:
        """Return where further loads of the block with *record* are counted."""
        return self.tallies.of(record.parent, record.name)

    def closed(self, before: InodeRecord, record: InodeRecord) -> None:
        """The last writer closed a block: it counts as stored, unless a rename must follow.

        That is so under a temporary name, or where only a rename publishes.
        """
        stores = before.state in _STORED_FROM and record.state not in _NOT_FINAL
        if stores and not is_temporary(record.name):
            self.stored(record, rewritten=before.state == State.REWRITE)

    def renamed(self, before: InodeRecord, record: InodeRecord) -> None:
        """A closed block got another name: it counts as stored if the old one was not final."""
        was_final = before.state not in _NOT_FINAL and not is_temporary(before.name)
        if was_final or record.state in _STORED_FROM:  # in these states the last close counts it
            return
        if not is_temporary(record.name):
            self.stored(record)

    def stored(self, record: InodeRecord, *, rewritten: bool = False) -> None:
        """A block is whole under a name that is not temporary.

        The time of a store is not counted for one *rewritten* in place: it was created long before.
        """
        tally = self.tallies.of(record.parent, record.name)
        tally.stored_blocks += 1
        tally.stored_bytes += record.allocated_bytes
        self.reuse.stored(record)
        if not rewritten:
            self.store_times.add(self._clock_ns() - record.btime_ns)
        if self.events.wanted:
            self.events.note(Kind.STORED, record.parent, record.name, bytes=record.size_bytes)

    def evicted(self, record: InodeRecord, asked: Reason, age_ns: int) -> None:
        """The block with *record* was evicted, *age_ns* after its last use."""
        reason = reason_for(record.state, asked)
        self._evicted_blocks[reason] += 1
        self._evicted_bytes[reason] += record.allocated_bytes
        tally = self.tallies.of(record.parent, record.name)
        tally.evicted_blocks += 1
        tally.evicted_bytes += record.allocated_bytes
        self.reuse.evicted(record, age_ns / SECOND_NS, self._monotonic_s())
        if self.events.wanted and not is_temporary(record.name):
            self.events.note(
                Kind.EVICTED,
                record.parent,
                record.name,
                bytes=record.size_bytes,
                reason=reason.value,
            )

    def removed(self, record: InodeRecord) -> None:
        """A client removed the block with *record*: a larger pool would not have it either."""
        self.reuse.removed(record)
        if self.events.wanted and S_ISREG(record.mode) and not is_temporary(record.name):
            self.events.note(Kind.REMOVED, record.parent, record.name, bytes=record.size_bytes)

    def tick(self, now_s: float) -> None:
        """Count the looks that turned out to be misses."""
        self.looks.settle(A_TICK)
        self.store_times.tick(now_s)
        self.reuse.tick()

    def shown(self, capacity_bytes: int, held_bytes: int) -> dict[str, Any]:
        """Return the figures for `kvfs status`: counts, bytes and seconds.

        *held_bytes* of the pool's *capacity_bytes* are for blocks with a name.
        """
        self.looks.settle()
        self.reuse.tick()
        tally = self.tallies.all()
        self.reuse.count(tally.hits + tally.misses - self._references)
        self._references = tally.hits + tally.misses
        total = tally.shown()
        del total["evicted_blocks"], total["evicted_bytes"]
        return {
            **total,
            "evicted": {
                reason.value: {
                    "blocks": self._evicted_blocks[reason],
                    "bytes": self._evicted_bytes[reason],
                }
                for reason in Reason
            },
            "uptime_s": round(self._monotonic_s() - self._started_s, 3),
            **self.reuse.shown(capacity_bytes, held_bytes),
            "directories": _by_name(self.tallies.by_directory()),
            "models": _by_name(self.tallies.by_model()),
        }

    def _missed(self, parent: InodeNo, name: bytes) -> None:
        if not is_temporary(name):
            self.tallies.of(parent, name).misses += 1
            self.reuse.missed(parent, name, self._monotonic_s())
            if self.events.wanted:
                self.events.note(Kind.MISSING, parent, name)


def _by_name(tallies: dict[str, Tally]) -> dict[str, Any]:
    return {name: tallies[name].shown() for name in sorted(tallies)}
