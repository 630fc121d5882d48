"""The cache's own figures: hits, misses, stores and evictions, as `kvfs status` shows them.

A hit is an open for reading. The kernel sends every open, even of a cached name. Reads are not seen
(passthrough), so a hit counts as a load of the whole block. looks.py says what a miss is.

All are counted by first-level directory and by model. A load of a known block must cost next to
nothing. So each pair of a directory and a model has one tally on each drive, which an open handle
keeps, and sums are computed on demand.
"""

from collections.abc import Callable, Iterable
from stat import S_ISDIR, S_ISREG
from typing import Any, Final

from kvfs.core.account import Taken
from kvfs.core.changed import Changed, Reason, Why
from kvfs.core.drives import Numbering
from kvfs.core.evicted import EvictedNames
from kvfs.core.latency import RecentLatency
from kvfs.core.lifecycle import UNFINISHED, State, is_temporary
from kvfs.core.reuse import NOT_FOLLOWED, ReuseWatch
from kvfs.core.settings import Settings
from kvfs.core.types import (
    FIRST_DRIVE,
    NO_INODE,
    ROOT_INODE,
    SECOND_NS,
    DriveNo,
    InodeNo,
    InodeRecord,
)
from kvfs.pool.figures.events import Events, Kind
from kvfs.pool.figures.held_by_model import OTHERS, Folders, HeldByModel, model_of
from kvfs.pool.figures.looks import A_TICK, Looks
from kvfs.pool.figures.touch_recordings import TouchRecordings
from kvfs.pool.rules.policies import TenantRules
from kvfs.pool.space.space import SpaceFigures
from kvfs.storage.heat import Heat
from kvfs.storage.index import Index

#: A last close in one of these states stores a block, if its name is final.
_STORED_FROM: Final = UNFINISHED | {State.RENAMED, State.REWRITE}
#: In these states a block is not stored yet: the rename that follows stores it.
_NOT_FINAL: Final = frozenset({State.UNRENAMED, State.ORPHAN})
#: Stands for files in the root directory itself.
ROOT_ITSELF: Final = "/"
_OTHERS_NAME: Final = OTHERS.encode()


class Tally:
    """The counts of one directory and model on a drive."""

    __slots__ = (
        "evicted_blocks",
        "evicted_bytes",
        "hits",
        "loaded_bytes",
        "misses",
        "stored_blocks",
        "stored_bytes",
    )

    def __init__(self) -> None:
        self.hits = self.loaded_bytes = self.misses = 0
        self.stored_blocks = self.stored_bytes = 0
        self.evicted_blocks = self.evicted_bytes = 0

    def add(self, other: "Tally") -> None:
        """Add the counts of *other*."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def shown(self) -> dict[str, Any]:
        """Return the counts, and ``hit_rate``: hits / (hits + misses), None if both are 0."""
        asked = self.hits + self.misses
        return {
            "hits": self.hits,
            "misses": self.misses,
            "hit_rate": self.hits / asked if asked else None,
            "loaded_bytes": self.loaded_bytes,
            "stored_blocks": self.stored_blocks,
            "stored_bytes": self.stored_bytes,
            "evicted_blocks": self.evicted_blocks,
            "evicted_bytes": self.evicted_bytes,
        }


def sum_of(tallies: Iterable[Tally]) -> Tally:
    """Return the sum of *tallies*."""
    total = Tally()
    for tally in tallies:
        total.add(tally)
    return total


class Tallies:
    """The tallies of one pool, of up to *names_max* directories and models; the rest share one."""

    def __init__(self, index: Index, folders: Folders, names_max: int) -> None:
        self._index: Final = index
        self._folders: Final = folders
        self._names_max: Final = names_max
        self._tallies: dict[tuple[InodeNo, bytes, DriveNo], Tally] = {}
        self._tops: set[InodeNo] = set()
        self._models: set[bytes] = set()
        #: The tally that was returned last, and for which directory, model in the name, and drive.
        self._last_parent = NO_INODE
        self._last_model = b""
        self._last_drive = FIRST_DRIVE
        self._last = Tally()

    def of(self, parent: InodeNo, name: bytes, drive: DriveNo = FIRST_DRIVE) -> Tally:
        """Return the tally that counts *name* in directory *parent*, whose block is on *drive*.

        A name without a block counts on the first drive.
        """
        model = model_of(name)
        # Most names have the same directory and model as the one before.
        if parent == self._last_parent and model == self._last_model and drive == self._last_drive:
            return self._last
        top, folder_model = self._folders.above(parent)
        tally = self._tallies.get((top, model or folder_model, drive))
        if tally is None:
            tally = self._enter(top, model or folder_model, drive)
        self._last_parent, self._last_model, self._last = parent, model, tally
        self._last_drive = drive
        return tally

    def tree_changed(self) -> None:
        """A directory moved: what is opened below it from now on counts where it is now."""
        self._folders.tree_changed()
        self._forget_last()

    def _forget_last(self) -> None:
        self._last_parent = NO_INODE

    def all(self) -> Tally:
        """Return the sum of everything counted."""
        return sum_of(self._tallies.values())

    def by_directory(self) -> dict[str, Tally]:
        """Return the tallies of the first-level directories by name."""
        self._fold_removed()
        found: dict[str, Tally] = {}
        for (top, _, _), tally in self._tallies.items():
            found.setdefault(self._shown_top(top), Tally()).add(tally)
        return found

    def by_model(self) -> dict[str, Tally]:
        """Return the tallies of the models by name; blocks whose name has no model are left out."""
        found: dict[str, Tally] = {}
        for (_, model, _), tally in self._tallies.items():
            if model:
                found.setdefault(model.decode(errors="backslashreplace"), Tally()).add(tally)
        return found

    def by_drive(self) -> dict[DriveNo, Tally]:
        """Return the tallies of drives by number, without drives for which nothing was counted."""
        found: dict[DriveNo, Tally] = {}
        for (_, _, drive), tally in self._tallies.items():
            found.setdefault(drive, Tally()).add(tally)
        return found

    def _enter(self, top: InodeNo, model: bytes, drive: DriveNo) -> Tally:
        """Return a new tally, or that of all others if there are too many names."""
        if top not in self._tops and len(self._tops) >= self._names_max:
            self._fold_removed()
        if top not in self._tops and len(self._tops) >= self._names_max:
            top = NO_INODE
        if model not in self._models and len(self._models) >= self._names_max:
            model = _OTHERS_NAME
        if top != NO_INODE:
            self._tops.add(top)
        if model and model != _OTHERS_NAME:
            self._models.add(model)
        return self._tallies.setdefault((top, model, drive), Tally())

    def _fold_removed(self) -> None:
        """Add the counts of removed directories to those of all others."""
        gone = {top for top in self._tops if self._index.inode_or_miss(top) is None}
        if not gone:
            return
        self._tops -= gone
        self._forget_last()
        for key in [key for key in self._tallies if key[0] in gone]:
            removed = self._tallies.pop(key)
            self._tallies.setdefault((NO_INODE, *key[1:]), Tally()).add(removed)

    def _shown_top(self, top: InodeNo) -> str:
        if top == ROOT_INODE:
            return ROOT_ITSELF
        record = None if top == NO_INODE else self._index.inode_or_miss(top)
        return OTHERS if record is None else record.name.decode(errors="backslashreplace")


class CacheFigures:
    """The figures of one pool since its server started."""

    follows: Final = frozenset(
        {Why.CLOSED, Why.RENAMED, Why.STORED, Why.RESTORED, Why.REMOVED, Why.LOST, Why.EVICTED}
    )

    def __init__(
        self,
        index: Index,
        settings: Settings,
        space: SpaceFigures,
        stored: Taken,
        tenants: TenantRules,
        monotonic_s: Callable[[], float],
        clock_ns: Callable[[], int],
        heat: Heat,
        age_ns: Callable[[], int],
        evicted: EvictedNames,
    ) -> None:
        """*clock_ns*: the clock of records; *age_ns*: that of ages, and so of the *heat*.

        *stored*: the bytes of blocks by tenant, as *tenants* say, counted here. *evicted*: the
        names that this server, and the last one, evicted.
        """
        drives = len(heat.held_on)
        #: None: there is one drive.
        self._drive_of: Final = Numbering(drives).drive if drives > 1 else None
        self._heat: Final = heat
        self._age_ns: Final = age_ns
        self._monotonic_s: Final = monotonic_s
        self._clock_ns: Final = clock_ns
        self._started_s: Final = monotonic_s()
        folders, names_max = Folders(index), settings.cache_directories_max
        self.tallies: Final = Tallies(index, folders, names_max)
        self.held: Final = HeldByModel(folders, names_max, stored, tenants)
        self.reuse: Final = ReuseWatch(space.capacity_bytes, evicted)
        self.looks: Final = Looks(monotonic_s, self._missed, self.reuse.was_evicted)
        #: The times from CREATE until a block is stored.
        self.store_times: Final = RecentLatency()
        self.events: Final = Events(index, clock_ns)
        self.recordings: Final = TouchRecordings(heat, monotonic_s)
        #: Hits and misses that ``reuse`` was told of.
        self._references = 0
        self._evicted_blocks = dict.fromkeys(Reason, 0)
        self._evicted_bytes = dict.fromkeys(Reason, 0)

    def follow(self, changed: Changed) -> None:
        """Count what was stored, removed or evicted."""
        before, after, why = changed.before, changed.after, changed.why
        if before is None:
            if after is not None and not is_temporary(after.name):
                self.stored(changed.ino, after, self._clock_ns())
        elif why is Why.EVICTED:
            used_ns = self._heat.used_ns(changed.ino)
            age_ns = 0 if used_ns is None else self._age_ns() - used_ns
            if self.recordings.wanted:
                self.recordings.went(changed.ino, before)
            self.evicted(changed.ino, before, changed.reason, age_ns)
        elif after is None:
            if self.recordings.wanted:
                self.recordings.went(changed.ino, before)
            self.removed(before)
        elif S_ISDIR(after.mode):
            self.tallies.tree_changed()
            self.events.tree_changed()
        elif why is Why.CLOSED or why is Why.STORED:
            self.closed(changed.ino, before, after)
        elif S_ISREG(after.mode):
            self.renamed(changed.ino, before, after)

    def loaded(self, ino: InodeNo, record: InodeRecord) -> None:
        """The block *ino* with *record* was opened for reading."""
        if record.state not in UNFINISHED:
            tally = self.tally_of(ino, record)
            tally.hits += 1
            tally.loaded_bytes += record.size_bytes
            if (followed := self.reuse.followed(record)) != NOT_FOLLOWED:
                self.reuse.loaded(followed)

    def tally_of(self, ino: InodeNo, record: InodeRecord) -> Tally:
        """Return where the block *ino* with *record*, and its further loads, are counted."""
        drive = FIRST_DRIVE if self._drive_of is None else self._drive_of(ino)
        return self.tallies.of(record.parent, record.name, drive)

    def closed(self, ino: InodeNo, before: InodeRecord, record: InodeRecord) -> None:
        """The last writer closed a block: it counts as stored, unless a rename must follow.

        That is so under a temporary name, or where only a rename publishes.
        """
        stores = before.state in _STORED_FROM and record.state not in _NOT_FINAL
        if stores and not is_temporary(record.name):
            # A rename has just set ctime: asking the kernel's clock again costs two system calls.
            at_ns = self._clock_ns() if record.name == before.name else record.ctime_ns
            self.stored(ino, record, at_ns, rewritten=before.state == State.REWRITE)

    def renamed(self, ino: InodeNo, before: InodeRecord, record: InodeRecord) -> None:
        """A closed block got another name: it counts as stored if the old one was not final."""
        was_final = before.state not in _NOT_FINAL and not is_temporary(before.name)
        if was_final or record.state in _STORED_FROM:  # in these states the last close counts it
            return
        if not is_temporary(record.name):
            self.stored(ino, record, record.ctime_ns)

    def stored(
        self, ino: InodeNo, record: InodeRecord, at_ns: int, *, rewritten: bool = False
    ) -> None:
        """A block is whole since *at_ns* under a name that is not temporary.

        The time of a store is not counted for one *rewritten* in place: it was created long before.
        """
        tally = self.tally_of(ino, record)
        tally.stored_blocks += 1
        tally.stored_bytes += record.allocated_bytes
        self.reuse.stored(record, self._monotonic_s)
        if not rewritten:
            self.store_times.add(at_ns - record.btime_ns)
        if self.events.wanted:
            self.events.add(Kind.STORED, record.parent, record.name, bytes=record.size_bytes)

    def evicted(self, ino: InodeNo, record: InodeRecord, asked: Reason, age_ns: int) -> None:
        """The block with *record* was evicted, *age_ns* after its last use (0: unknown)."""
        reason = asked
        if asked is Reason.SPACE and record.state == State.ORPHAN:
            reason = Reason.ORPHAN
        self._evicted_blocks[reason] += 1
        self._evicted_bytes[reason] += record.allocated_bytes
        tally = self.tally_of(ino, record)
        tally.evicted_blocks += 1
        tally.evicted_bytes += record.allocated_bytes
        self.reuse.evicted(record, age_ns / SECOND_NS, self._monotonic_s())
        if self.events.wanted and not is_temporary(record.name):
            self.events.add(
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
            self.events.add(Kind.REMOVED, record.parent, record.name, bytes=record.size_bytes)

    def run_due(self, now_s: float) -> None:
        """Count the looks that turned out to be misses."""
        self.recordings.run_due(now_s)
        self.looks.settle(A_TICK)
        self.store_times.run_due(now_s)
        self.reuse.count_loads()

    def asked(self) -> tuple[int, int]:
        """Return all hits and misses."""
        self.looks.settle()
        total = self.tallies.all()
        return total.hits, total.misses

    def shown(self, capacity_bytes: int, held_bytes: int) -> dict[str, Any]:
        """Return the figures for `kvfs status`: counts, bytes and seconds.

        *held_bytes* of the pool's *capacity_bytes* are for blocks with a name.
        """
        self.looks.settle()
        self.reuse.count_loads()
        tally = self.tallies.all()
        self.reuse.count(tally.hits + tally.misses - self._references)
        self._references = tally.hits + tally.misses
        total, uptime_s = tally.shown(), self._monotonic_s() - self._started_s
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
            "uptime_s": round(uptime_s, 3),
            "tier_behind": self.reuse.shown_behind(self._references, uptime_s),
            **self.reuse.shown(capacity_bytes, held_bytes),
            "directories": _by_name(self.tallies.by_directory()),
            "models": _by_name(self.tallies.by_model()),
        }

    def _missed(self, parent: InodeNo, name: bytes) -> None:
        if not is_temporary(name):
            self.tallies.of(parent, name).misses += 1
            self.reuse.missed(parent, name, self._monotonic_s())
            if self.events.wanted:
                self.events.add(Kind.MISSING, parent, name)


def _by_name(tallies: dict[str, Tally]) -> dict[str, Any]:
    return {name: tallies[name].shown() for name in sorted(tallies)}
