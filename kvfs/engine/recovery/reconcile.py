"""After a start that went back to a logged moment: compares the index with what the files say.

Inodes younger than that moment, those pending at it, and all directories and symlinks are
settled before the first request. The rest is settled while requests are served: one after the
other, or at once if a request needs it. So nobody sees a block that its file does not confirm.

Name and attributes are those of the newer one of record and identity; only an identity shows that
the bytes are whole. A directory or symlink without an identity stays: its record is durable.

A row of the index says how far this has come. A start after a kill or a clean stop goes on there.
"""

import logging
import stat
from collections import deque
from collections.abc import Container, Iterator
from itertools import chain, islice
from typing import Final

from kvfs.core.changed import Changed, Why
from kvfs.core.errors import Damaged, NotAtHand
from kvfs.core.inode_rules import Ascent
from kvfs.core.lifecycle import State
from kvfs.core.log_records import Moment
from kvfs.core.records import INODE_PREFIX, Doubt, inode_key, parse_inodes
from kvfs.core.types import FIRST_INODE, INODE_END, ROOT_INODE, InodeNo, InodeRecord, Sequence
from kvfs.engine.names.tree_change import Move, TreeChange, one_name
from kvfs.engine.recovery.file_claims import (
    ClaimsAtHand,
    agrees,
    block_record,
    claimed_attributes,
    has_bytes,
    newer_attributes,
    node_record,
    updated,
    young_inodes,
)
from kvfs.engine.recovery.finish_drafts import OPEN_STATES
from kvfs.pool.pool import Pool

_log: Final = logging.getLogger(__name__)

#: Inodes in one step of the thread, some 5 ms; other long jobs run in between.
_FILES_A_STEP: Final = 256
#: Inodes settled in one tick, on the loop's thread.
_SETTLED_A_TICK: Final = 64
#: New blocks in one transaction.
_YOUNG_BATCH: Final = 1024
#: More sequence numbers than a server gives out after it last logged; there are 2**64.
_SEQUENCES_LEFT_OUT: Final = 1 << 32
#: Passes over the directories: one may have moved below another that is settled later, and so on.
_NODE_ROUNDS: Final = 64


class Reconcile:
    """The comparison of one pool; it is ``done`` when every inode agrees with its file."""

    def __init__(self, pool: Pool, gone_back: Moment | None) -> None:
        """*gone_back*: the moment that the index just went back to. Raises NoSpace, OSError."""
        self._pool = pool
        self._found: deque[tuple[InodeNo, bool]] = deque()
        self._settling: set[InodeNo] = set()
        self._claims = ClaimsAtHand(pool.extents, pool.background, pool.syscalls)
        self._searching = False
        self._searched = False
        self.dropped = self.entered = self.moved = 0
        if gone_back is not None:
            # From now on each change has a higher number than any file from before the power loss.
            sequence = Sequence(pool.counters.sequence + _SEQUENCES_LEFT_OUT)
            with pool.change(pool.counters._replace(sequence=sequence)):
                pass
            self._doubt: Doubt | None = Doubt(pool.numbers.first, FIRST_INODE, sequence)
            self._settle_first(gone_back)
            self._write_doubt()
        else:
            self._doubt = self._left()
        #: Whether any inode may be in doubt; ``prove`` knows which.
        self.in_doubt = self._doubt is not None
        self._work = self._steps()

    @property
    def done(self) -> bool:
        """Whether nothing is in doubt."""
        return self._doubt is None

    def describe(self) -> dict[str, float | int]:
        """Return what `kvfs status` shows: the share that is done, 0 to 1, and what changed."""
        share, serial = 1.0, self._pool.numbers.serial
        if self._doubt is not None:
            share = min(1.0, serial(self._doubt.verified) / max(1, self._doubt.below))
        return {
            "share": round(share, 4),
            "entered": self.entered,
            "moved": self.moved,
            "dropped": self.dropped,
        }

    def start(self) -> None:
        """Go on in the background; ``run_due`` settles what is found."""
        if self._doubt is not None:
            self._searching = True
            self._pool.background.submit_long(self._search)

    def run_due(self) -> bool:
        """Settle some of what was found; on the loop's thread. Return whether it was the last.

        Raises NoSpace, OSError.
        """
        some = list(islice(self._found, _SETTLED_A_TICK))
        for ino, passed in some:
            if passed and self._doubt is not None:
                self._doubt = self._doubt._replace(verified=ino)
            else:
                try:
                    self.prove(ino)
                except NotAtHand:
                    self._claims.read_ahead(other for other, passes in some if not passes)
                    return False
            self._found.popleft()
        if not self._searching and not self._found:
            self._end()
        return self.done

    def prove(self, ino: InodeNo) -> bool:
        """Return whether the index was right about *ino*, else correct it.

        Called while some are ``in_doubt``. Raises NoSpace, NotAtHand, OSError.
        """
        doubt = self._doubt
        if doubt is None or ino in self._pool.open.inodes:
            return True
        if self._pool.numbers.serial(ino) >= doubt.below:
            return True
        named = self._pool.index.inode_or_miss(ino)
        record = one_name(self._pool, ino, named, doubt.below)
        if record is not named:
            self.prove(ino)
            return False
        if record is not None and (record.sequence > doubt.sequence or not has_bytes(record)):
            return True
        if record is None and not self._pool.index.knows(ino):
            return True  # evicted or removed since it was found: its extent goes in a moment
        if ino in self._pool.durable.not_durable:  # a slab that was opened here, and not written
            return True
        return not self._settle(ino)

    # ---- before the first request ----

    def _settle_first(self, moment: Moment) -> None:
        pool = self._pool
        stale, drive = pool.run.stale, pool.numbers.drive
        nodes = [ino for ino in pool.extents.scan_nodes() if drive(ino) not in stale]
        for _ in range(_NODE_ROUNDS):
            nodes = [ino for ino in nodes if not self._settle_node(ino)]
            if not nodes:
                break
        suspects = chain(moment.pending, young_inodes(pool, moment.young))
        self._enter_all(ino for ino in suspects if drive(ino) not in stale or pool.index.knows(ino))
        with pool.index.write() as txn:
            txn.put_unfinished(())
        _log.warning(
            "index of a moment before the power loss: %d younger inodes entered, %d moved, "
            "%d dropped; the rest is compared while it is in use",
            self.entered,
            self.moved,
            self.dropped,
        )

    def _enter_all(self, inos: Iterator[InodeNo]) -> None:
        """Settle blocks in batches; new ones with a free name in one transaction a batch."""
        pool = self._pool
        while batch := list(islice(inos, _YOUNG_BATCH)):
            plain: dict[tuple[InodeNo, bytes], tuple[InodeNo, InodeRecord]] = {}
            others: list[InodeNo] = []
            for ino in batch:
                claim = block_record(pool.extents, pool.syscalls, ino)
                known = pool.index.knows(ino)
                if claim is None and not known:
                    continue
                if claim is None or known or not self._is_free(claim, plain):
                    others.append(ino)
                else:
                    plain[claim.parent, claim.name] = (ino, claim)
            if pool.index.preallocation_due():
                pool.index.preallocate()
            with TreeChange(pool, pool.clock_ns()) as change:
                for ino, claim in plain.values():
                    attributes = claimed_attributes(pool.extents, ino, claim)
                    change.link(ino, claim, attributes, why=Why.RECONCILED)
            self.entered += len(plain)
            for ino in others:
                one_name(pool, ino, pool.index.inode_or_miss(ino), INODE_END)
                self._settle(ino)

    def _is_free(self, claim: InodeRecord, others: Container[tuple[InodeNo, bytes]]) -> bool:
        place = (claim.parent, claim.name)
        return place not in others and self._is_directory(claim.parent) and self._at(claim) is None

    def _settle_node(self, ino: InodeNo) -> bool:
        """Settle a directory or symlink; False if the directory that it claims is not there yet."""
        pool = self._pool
        claim = node_record(pool.extents, ino)
        record = pool.index.inode_or_miss(ino)
        if claim is None or (record is not None and record.sequence >= claim.sequence):
            return True
        if ino == ROOT_INODE:
            if record is not None:
                newer = newer_attributes(pool.extents, ino, record, claim)
                after = updated(record, claim)
                with TreeChange(pool, pool.clock_ns()) as change:
                    change.write(Changed(ino, record, after, Why.RECONCILED))
                    if newer is not None:
                        change.take_attributes(ino, after, newer)
            return True
        if not self._is_directory(claim.parent) or self._is_below(claim.parent, ino):
            return False
        # A directory's file does not say how many names it has.
        self._give_name(ino, record, claim if record is None else updated(record, claim))
        return True

    def _is_below(self, directory: InodeNo, ino: InodeNo) -> bool:
        """Whether *directory* is *ino* or lies below it."""
        above, ascent = directory, Ascent()
        while ascent.goes_on(above):
            if above == ino:
                return True
            record = self._pool.index.inode_or_miss(above)
            if above == ROOT_INODE or record is None:
                return False
            above = record.parent
        return True

    # ---- one inode ----

    def _settle(self, ino: InodeNo) -> bool:
        """Make the index agree with the file of block *ino*; return whether that changed it."""
        pool = self._pool
        claim = self._claims.of(ino)
        record = pool.index.inode_or_miss(ino)
        if claim is None or not self._is_directory(claim.parent):
            return record is not None and self._drop(ino, record)
        if record is not None and record.state not in OPEN_STATES:
            if claim.sequence <= record.sequence:
                same = (claim.size_bytes, claim.mtime_ns) == (record.size_bytes, record.mtime_ns)
                return not same and self._drop(ino, record)
            claim = updated(record, claim)
        self._settling.add(ino)
        try:
            self._give_name(ino, record, claim)
        finally:
            self._settling.discard(ino)
        return True

    def _give_name(self, ino: InodeNo, record: InodeRecord | None, claim: InodeRecord) -> None:
        """Enter *ino* with the name that it claims, unless a newer inode has it."""
        pool = self._pool
        rival = self._at(claim)
        if rival is not None and rival != ino and rival not in self._settling:
            self.prove(rival)
            rival = self._at(claim)
            record = pool.index.inode_or_miss(ino)
        replaced: InodeRecord | None = None
        if rival is not None and rival != ino:
            replaced = pool.index.inode_or_miss(rival)
            if replaced is not None and replaced.sequence >= claim.sequence:
                if record is not None:
                    self._drop(ino, record)
                return
        newer = None if record is None else newer_attributes(pool.extents, ino, record, claim)
        # Atomic: no checkpoint from the look at the rival until the commit.
        with TreeChange(pool, pool.clock_ns()) as change:
            if rival is not None and replaced is not None:
                change.unlink(rival, replaced, Why.RECONCILED)
                self.dropped += 1
            if record is None:
                attributes = claimed_attributes(pool.extents, ino, claim)
                change.link(ino, claim, attributes, why=Why.RECONCILED)
                self.entered += 1
            else:
                change.move(Move(ino, record, claim), why=Why.RECONCILED)
                if newer is not None:
                    change.take_attributes(ino, claim, newer)
                self.moved += 1

    def _drop(self, ino: InodeNo, record: InodeRecord) -> bool:
        """Remove *ino* and its name; its file is left to the sweep."""
        with TreeChange(self._pool, self._pool.clock_ns()) as change:
            change.unlink(ino, record, Why.RECONCILED)
        self.dropped += 1
        return True

    def _at(self, claim: InodeRecord) -> InodeNo | None:
        try:
            return self._pool.index.lookup(claim.parent, claim.name)
        except Damaged as error:
            self._pool.damage.miss_name(claim.parent, claim.name, None, str(error))
            return None

    def _is_directory(self, ino: InodeNo) -> bool:
        record = self._pool.index.inode_or_miss(ino)
        return record is not None and stat.S_ISDIR(record.mode)

    # ---- while requests are served ----

    def _left(self) -> Doubt | None:
        """Return what an earlier server left to do."""
        if self._pool.settings.read_only:
            return None
        try:
            return self._pool.index.doubt()
        except Damaged as error:
            _log.warning("%s: all is compared anew", error)
            return Doubt(self._pool.numbers.first, FIRST_INODE, self._pool.counters.sequence)

    def _search(self) -> None:
        """Do one step, in the thread. A failure is counted; the next start goes on."""
        more = False
        try:
            more = next(self._work, None) is not None
            self._searched = not more
        finally:
            if not more:
                self._searching = False
        if more:
            self._pool.background.submit_long(self._search)

    def _steps(self) -> Iterator[int]:
        """Find inodes for the loop to settle; yield now and then. They are only guesses."""
        pool, doubt = self._pool, self._doubt
        assert doubt is not None
        after = inode_key(InodeNo(doubt.verified - 1))
        for rows in pool.index.walk(INODE_PREFIX, _FILES_A_STEP, after=after, committed=True):
            for ino, record in parse_inodes(rows):
                old = pool.numbers.serial(ino) < doubt.below
                if old and record is not None and self._is_doubtful(ino, record):
                    self._found.append((ino, False))
                last = ino
            self._found.append((InodeNo(last + 1), True))
            yield len(rows)

    def _is_doubtful(self, ino: InodeNo, record: InodeRecord) -> bool:
        if not has_bytes(record):
            return record.state == State.ALIAS
        claim = block_record(self._pool.extents, self._pool.syscalls, ino)
        return claim is None or not agrees(record, claim)

    def _write_doubt(self) -> None:
        with self._pool.index.write() as txn:
            txn.put_doubt(self._doubt)

    def _end(self) -> None:
        """Note the end, unless the search failed: then the next start goes on."""
        if self._searched and self._doubt is not None:
            self._doubt = None
            self.in_doubt = False
            self._write_doubt()
            _log.info(
                "index compared with its files: %d entered, %d moved, %d dropped",
                self.entered,
                self.moved,
                self.dropped,
            )
