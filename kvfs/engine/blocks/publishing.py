"""Both ends of writing a block: its first open for writing, and its new state at the last close.

The tables in writing.py and lifecycle.py say what a close means. Here that is carried out: by one
index transaction, or by removing the name.
"""

import functools
import logging
import stat
from typing import Final, NamedTuple

from kvfs.core.changed import Changed, Why
from kvfs.core.errors import KvfsError
from kvfs.core.lifecycle import (
    BESIDE_SLAB_MAX,
    HELD,
    LEASES,
    UNFINISHED,
    Event,
    State,
    after,
    is_index,
    is_temporary,
)
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.engine.blocks.trims import Trims
from kvfs.engine.names.namespace import Namespace
from kvfs.machine.process_ends import Fate
from kvfs.machine.processes import NOBODY, Maker
from kvfs.pool.open.extent_bytes import measured, not_before
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.pool import Pool

_log: Final = logging.getLogger(__name__)


class Closing(NamedTuple):
    """The last FLUSH of a handle: its thread, that thread's fate, and the extent at that moment.

    ``size_bytes`` is -1 without a FLUSH: the file was never a descriptor of a process.
    """

    tid: int
    closer: Maker
    fate: Fate
    at_s: float
    size_bytes: int
    mtime_ns: int


class Publishing:
    """Begins and ends the writing of blocks."""

    def __init__(self, pool: Pool, namespace: Namespace) -> None:
        self._pool = pool
        self._namespace = namespace
        self._identities = pool.durable.identities
        self._trims = Trims(pool)
        self.torn = 0

    # ---- beginning ----

    def begin(
        self,
        opened: OpenInode,
        record: InodeRecord,
        maker: Maker,
        *,
        appends: bool,
        late: bool = False,
    ) -> None:
        """Note that a writer opened the block *record*. Raises NoSpace, OSError.

        If *late*, it has written already.

        The extent gets the times of the record, because while there are writers its times are the
        valid ones. A final block is marked as being rewritten: after a crash its record could be
        wrong, and after a power loss its old bytes could not be told from the new ones.
        """
        pool = self._pool
        state = State(record.state)
        appends = appends or record.size_bytes == 0
        if opened.writers > 1:
            opened.join(appends=appends)
            if state is not State.RENAMED or opened.gone is not None:
                return
            opened.join_renamed()
        else:
            opened.begin(state, appends=appends)  # even if the rest fails: no empty block
            if late:
                pool.syscalls.fstat(opened.fd)
            else:
                self.set_times(opened, (record.atime_ns, record.mtime_ns))
            opened.belong_to(maker)
            if state is State.UNRENAMED and maker == NOBODY:  # truncate(2): still its maker's
                opened.belong_to(Maker(record.maker_tgid, record.maker_birth))
        pool.open.notes.writing(opened)
        if state in UNFINISHED:
            return
        if opened.gone is not None:  # a power loss may bring its name back
            opened.note_identity(lingers=self._identities.withdraw_now(opened.ino))
            return
        reopened = after(state, Event.REOPEN)
        # Also for a slab, whose state stays: a start after a kill measures what was being written.
        with pool.change(pool.counters, begun=opened.ino) as change:
            if reopened is not state:
                rewrite = record._replace(state=reopened)
                change.write(Changed(opened.ino, record, rewrite, Why.REOPENED))
        if reopened is not state:
            opened.rewrite()
        opened.note_identity(lingers=self._identities.withdraw_now(opened.ino))
        if not record.size_bytes:  # no old bytes that could mix with new ones
            opened.note_identity(lingers=False)

    def set_times(self, opened: OpenInode, times_ns: tuple[int, int]) -> None:
        """Set atime and mtime on the extent of *opened*.

        While requests are served the device's thread does it: wait until it is settled (``opened``)
        before the client may write. Raises OSError.
        """
        work = functools.partial(self._set_times, opened.fd, times_ns)
        opened.settle(self._pool.background.of(opened.ino).device, work)

    def _set_times(self, fd: int, times_ns: tuple[int, int]) -> None:
        self._pool.syscalls.utime(fd, ns=times_ns)
        # After a stat the next write sets a new mtime (multigrain timestamps, Linux 6.13), which
        # shows that something was written.
        self._pool.syscalls.fstat(fd)

    def must_forget(self, opened: OpenInode) -> bool:
        """Whether a writer may overwrite bytes that still have an identity on the device.

        A block opened to append is no exception: a program may clear O_APPEND with fcntl(2), or
        store through a mapping.
        """
        if opened.identity_lingers and not self._identities.was_identified(opened.ino):
            opened.note_identity(lingers=False)
        return opened.identity_lingers

    def forget_durably(self, opened: OpenInode) -> None:
        """Wait until the device has no identity of *opened*; in a thread. Raises OSError."""
        self._pool.syscalls.fsync(opened.fd)
        self.note_forgotten(opened)

    def note_forgotten(self, opened: OpenInode) -> None:
        """Note that the extent of *opened* was fsynced after its identity was removed."""
        opened.note_identity(lingers=False)
        self._identities.forgotten(opened.ino)

    def allocate_ahead(self, ino: InodeNo) -> None:
        """Note that space was allocated ahead of bytes (fallocate, truncate up), as for a slab.

        Raises NoSpace.
        """
        opened = self._pool.open.inodes.get(ino)
        if opened is not None and opened.gone is not None:
            return
        record = self._namespace.record(ino)
        state = State(record.state)
        if opened is not None and state is State.REWRITE:
            opened.resize()
            if opened.before is State.ORPHAN_SLAB or not record.size_bytes:
                state = opened.before  # it has no whole bytes to lose
        state = after(state, Event.ALLOCATE)
        if state == record.state:
            return
        if opened is not None:
            opened.allocate(state)
        if opened is not None and opened.writers:
            maker = opened.maker
            record = record._replace(maker_tgid=maker.tgid, maker_birth=maker.birth)
        reserved = record._replace(state=state)
        with self._pool.change(self._pool.counters) as change:
            change.write(Changed(ino, record, reserved, Why.RESERVED))

    def touched(self, ino: InodeNo, record: InodeRecord) -> InodeRecord:
        """Return *record* with new times: emptying an empty file is a change, too (open(2))."""
        pool = self._pool
        now_ns, sequence = pool.clock_ns(), pool.counters.next_sequence
        touched = record._replace(mtime_ns=now_ns, ctime_ns=now_ns, sequence=sequence)
        with pool.change(pool.counters._replace(sequence=sequence)) as change:
            change.write(Changed(ino, record, touched, Why.SET))
        return touched

    # ---- ending ----

    def look_at_closer(self, opened: OpenInode, tid: int) -> Closing | None:
        """Check thread *tid*, which closes a writer's descriptor: is it dying of a signal?

        A FLUSH is not a commit: dup2, fork and exec cause one in the middle of a write. Returns
        what the RELEASE must know of it, None if no doubt can follow. Raises OSError.
        """
        if not opened.unfinished or opened.torn or opened.fd < 0:
            return None
        pool = self._pool
        fate = pool.rules.leases.processes.fate_of(tid)
        if fate is Fate.KILLED:
            if not self._survives_kill(opened):
                opened.tear()
                pool.open.notes.writing(opened)
            return None
        now_s = pool.monotonic_s()
        status = pool.syscalls.fstat(opened.fd)
        opened.note_flushed(status.st_size, status.st_mtime_ns)
        closer = pool.rules.leases.processes.of(tid, now_s)
        return Closing(tid, closer, fate, now_s, status.st_size, status.st_mtime_ns)

    def _survives_kill(self, opened: OpenInode) -> bool:
        """Whether *opened* stays as a killed writer left it: a part of a unit.

        A database recovers from what it had written; without one of its files it is dead for good.
        """
        record = self._pool.index.inode_or_miss(opened.ino)
        return record is not None and bool(self._pool.rules.policies.of(record.parent).unit)

    def never_closed(self, opened: OpenInode, tid: int) -> Closing:
        """Return what is known of a handle of thread *tid* that had no close(2).

        Such a file was never a descriptor (io_uring), or its opener died in open(2).
        """
        pool, maker = self._pool, opened.maker
        fate = Fate.LIVES if tid > 0 else Fate.UNKNOWN
        if not maker.is_one and not pool.rules.leases.processes.is_kernel_thread(tid):
            fate = Fate.UNKNOWN
        return Closing(tid, maker, fate, pool.monotonic_s(), -1, 0)

    def publish(self, opened: OpenInode) -> None:
        """Write to the index what the last writer's close makes of it. Raises NoSpace, OSError."""
        pool = self._pool
        if opened.fd < 0:
            return  # the open failed, so nothing was written or marked
        if opened.gone is not None and pool.space.drives.of(opened.ino).has_failed:
            opened.end(whole=False)  # nobody can ask what it holds
            pool.open.notes.changed(opened)
            return
        before = self._namespace.record(opened.ino)
        record = measured(pool.syscalls, opened, before)
        written = record is not before
        allocated_bytes = self._trims.begin(opened, before, record)
        if opened.mixes and record.size_bytes:
            opened.tear()
        if opened.gone is not None:
            if before.state == State.REWRITE and not written:  # it was whole before, and stays so
                record = record._replace(state=opened.before)
            opened.lose_name(record)
            opened.end(whole=False)
            pool.open.notes.changed(opened)
            return
        state = self._closed(opened, before, allocated_bytes, written=written)
        if state is State.GONE:
            self._drop_torn(opened, record)
            opened.end(whole=False)
            return
        same = state == opened.before == before.state and not written
        if not same or allocated_bytes != before.allocated_bytes:
            record = not_before(before, record)
            owned = self._owned(opened, record, state, allocated_bytes, written=written)
            self._record(opened, before, owned)
        else:
            # The open removed its identity. This gets it written again.
            pool.followers.tell(Changed(opened.ino, before, before, Why.CLOSED))
            opened.end(whole=True)
        if opened.quiet_writers:
            status = pool.syscalls.fstat(opened.fd)
            opened.note_left(status.st_size, status.st_mtime_ns)

    def finished(self, opened: OpenInode, before: InodeRecord) -> InodeRecord | None:
        """Return the record of a draft that is closed and gets its rename now; None if it is torn.

        *before* is its record. The caller writes the new one to the index. Raises OSError.
        """
        record = measured(self._pool.syscalls, opened, before)
        allocated_bytes = self._trims.begin(opened, before, record)
        state = opened.last_close(State(before.state), written=record is not before)
        if state is State.GONE:
            return None
        # No process owns it, as it is renamed.
        return not_before(before, record)._replace(
            state=after(state, Event.RENAME),
            allocated_bytes=allocated_bytes,
            maker_tgid=0,
            maker_birth=0,
        )

    def end(self, opened: OpenInode, growth_bytes: int) -> None:
        """Note that the index has the final record of *opened*, *growth_bytes* larger."""
        self._pool.space.of(opened.ino).extra_bytes -= growth_bytes
        opened.note_identity(lingers=False)
        # Not earlier: until it is published the death of another writer tears it.
        opened.end(whole=True)

    def _closed(
        self, opened: OpenInode, record: InodeRecord, allocated_bytes: int, *, written: bool
    ) -> State:
        """Return the state of the block with *record* after its last writer's close."""
        state = opened.last_close(State(record.state), written=written)
        closes = record.state in UNFINISHED and state in (State.LEASED, State.SLAB)
        if closes and self._pool.rules.policies.of(record.parent).only_renamed:
            return after(state, Event.WITHHOLD)  # it waits for its rename, however long
        due = state in LEASES and (written or state is not opened.before)
        # As if its maker had ended. But no orphan: it would go first, and its rename may follow.
        if not due or self._gets_lease(record, allocated_bytes):
            return state
        return after(state, Event.MAKER_DIED)

    def _gets_lease(self, record: InodeRecord, allocated_bytes: int) -> bool:
        """Whether the block with *record* belongs to its writer once it is closed."""
        pool = self._pool
        if not pool.rules.policies.of(record.parent).leases and not is_temporary(record.name):
            return False
        if not allocated_bytes and pool.empty_names_too_many():
            return False
        return pool.rules.leases.shares.gives(record.uid, allocated_bytes)

    def _owned(
        self,
        opened: OpenInode,
        record: InodeRecord,
        state: State,
        allocated_bytes: int,
        *,
        written: bool,
    ) -> InodeRecord:
        """Return *record* in *state*, with the maker it belongs to from now on."""
        maker = opened.maker if state in HELD else NOBODY
        looked = not written or opened.maker == NOBODY
        if state == opened.before and state in HELD and looked:
            # A process that wrote nothing does not become its maker.
            maker = Maker(record.maker_tgid, record.maker_birth)
        return record._replace(
            state=state,
            allocated_bytes=allocated_bytes,
            sequence=self._pool.counters.next_sequence,
            maker_tgid=maker.tgid,
            maker_birth=maker.birth,
        )

    def _record(self, opened: OpenInode, before: InodeRecord, record: InodeRecord) -> None:
        pool = self._pool
        growth_bytes = record.allocated_bytes - before.allocated_bytes
        counters = pool.counters._replace(
            used_bytes=pool.counters.used_bytes + growth_bytes, sequence=record.sequence
        )
        # If this transaction need not last, one that must will follow: for the rename or a tick.
        lasting = before.state not in UNFINISHED or not is_temporary(record.name)
        with pool.change(counters, finished=opened.ino, lasting=lasting) as change:
            change.write(Changed(opened.ino, before, record, Why.CLOSED))
        self.end(opened, growth_bytes)

    def _drop_torn(self, opened: OpenInode, record: InodeRecord) -> None:
        """Remove the name of a block whose writer died in the middle: a miss, never wrong bytes."""
        self._namespace.lose(opened.ino)
        if opened.gone is not None:  # readers still read the bytes that were written
            opened.lose_name(record._replace(ctime_ns=opened.gone.ctime_ns))
            self._pool.open.notes.changed(opened)
        self.torn += 1
        if record.state == State.SLAB_DRAFT:
            self._lose_indexes(record.parent)

    def _lose_indexes(self, directory: InodeNo) -> None:
        """Remove what may say what was in a torn slab: one made anew beside it would give zeros."""
        index = self._pool.index
        above = index.inode_or_miss(directory)
        if above is None or above.entries > BESIDE_SLAB_MAX:
            return
        beside = [one for some in index.below(directory, BESIDE_SLAB_MAX) for one, _ in some]
        for ino in beside:
            own = index.inode_or_miss(ino)
            if own is not None and stat.S_ISREG(own.mode) and is_index(own.name):
                self._namespace.lose(ino)

    def dismiss(self, opened: OpenInode, error: Exception) -> bool:
        """Remove the name of a block whose bytes are lost: a miss, not an error that stays.

        Return False if that fails, too.
        """
        if opened.gone is None:
            try:
                self._namespace.lose(opened.ino)
            except (KvfsError, OSError):
                return False
        self._pool.lost_blocks += 1
        _log.error("inode %#x lost: %s", opened.ino, error)
        return True

    def dismiss_lost(self, ino: InodeNo) -> bool:
        """Remove the name of block *ino*, open or not, whose bytes the device lost.

        Return False if there is no such block. Raises NoSpace, OSError.
        """
        record = self._pool.index.inode_or_miss(ino)
        if record is None or not stat.S_ISREG(record.mode):
            return False
        self._namespace.lose(ino)
        self._pool.lost_blocks += 1
        return True
