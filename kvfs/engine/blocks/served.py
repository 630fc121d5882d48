"""Handles of file servers, which close late or never: an open one may have no client any more.

A server that has not written for a while (``file_server_close_s``), or has renamed what it wrote,
counts as closed. From then on its handle counts as a reader's, which reserves no space and does not
keep the block from eviction. If it writes again, the next check of the block finds that out, and it
is a writer again.

A whole block that a server empties becomes a draft, which only servers find. A program's O_TRUNC
gets a new inode (truncating_open.py). A server cannot: it has a handle, sets the size to 0, and its
client then writes by that handle. A process that has the block open sees this, as on any file
system. Nobody else sees less than the whole block. The server may close its handle meanwhile, so
the draft is kept open for it.
"""

import contextlib
import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from kvfs.core.changed import Changed, Why
from kvfs.core.errors import Damaged, KvfsError, NotAtHand
from kvfs.core.lifecycle import HIDEABLE, Event, State, after, is_temporary
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.engine.blocks.publishing import Publishing
from kvfs.machine.processes import SERVER
from kvfs.pool.allocator import Allocator
from kvfs.pool.open.open_inodes import Hand, OpenInode
from kvfs.pool.pool import Pool

_log: Final = logging.getLogger(__name__)

#: Blocks checked in one tick, at some 2 us each.
_LOOKS_A_TICK: Final = 256
_NS: Final = 1_000_000_000
#: If the two clocks moved apart by more than this, somebody has set the wall clock.
_SET_NS: Final = _NS
#: Writers that are no client's handle: the one that empties the block, and the one kept open.
_OWN_WRITERS: Final = 2


class _Watched(NamedTuple):
    """A block that a server writes, as of the last look at it."""

    due_s: float
    ctime_ns: int
    """0: not looked at yet."""
    idle_ns: int
    """For how long nobody had written then."""
    age_ns: int
    wall_ns: int
    """When that look was, by both clocks."""


class Served:
    """The handles of file servers on the blocks of one pool."""

    def __init__(
        self, pool: Pool, publishing: Publishing, close_writer: Callable[[OpenInode], None]
    ) -> None:
        """*close_writer* closes one writer's handle."""
        self._pool = pool
        self._publishing = publishing
        self._close_writer = close_writer
        #: Blocks that servers are writing, soonest checked first.
        self._written: OrderedDict[InodeNo, _Watched] = OrderedDict()
        #: Bytes of blocks that servers have open on passthrough, as they were last counted.
        self.passing_bytes = 0

    def must_ask(self, opened: OpenInode) -> bool:
        """Whether a server's next handle of *opened* must not use passthrough.

        A block that a server has open on passthrough keeps its space even without a name. So only
        a part of the pool may be open that way (``file_server_passthrough_max``). Blocks beyond it
        are read and written through this process, and can be evicted at any time.
        """
        pool = self._pool
        bound_bytes = pool.settings.file_server_passthrough_max * pool.space.taken.usable_bytes
        return not opened.served_passing and (
            self.passing_bytes + opened.allocated_bytes > bound_bytes
        )

    def opened(self, opened: OpenInode, *, writer: bool, passing: bool) -> None:
        """Note that one handle of *opened* belongs to a server; *passing*: on passthrough."""
        opened.serve(writer=writer, passing=passing)
        self._count_passing(opened)
        if writer:
            self._look_in(opened.ino, self._pool.settings.file_server_close_s)

    def _count_passing(self, opened: OpenInode) -> None:
        """Count what servers keep open of it on passthrough, as it is now."""
        self.passing_bytes += opened.count_passing(opened.allocated_bytes)

    def closed(self, opened: OpenInode, *, writer: bool, passing: bool) -> bool:
        """Note that a server closes a handle; return whether it still counts as a *writer*'s."""
        self.require_at_hand(opened)
        opened.stop_passing(passing=passing)
        self._count_passing(opened)
        self.notice_late_write(opened)
        writes = opened.stop_serving(writer=writer)
        if opened.kept_open and opened.served_writers == 1 and self._has_bytes(opened):
            self._count_as_closed(opened)
        return writes

    def keep_open(self, opened: OpenInode) -> None:
        """Keep *opened* open for a server, which emptied it by a handle and will write it."""
        self._pool.open.inodes.enter(opened.ino, writer=True)
        opened.keep_open()
        opened.begin_flushes()
        self.opened(opened, writer=True, passing=False)

    def _has_bytes(self, opened: OpenInode) -> bool:
        """Whether it has bytes; without any the server may only have emptied it so far."""
        with contextlib.suppress(OSError):
            return self._pool.syscalls.fstat(opened.fd).st_size > 0
        return False

    def renames(self, ino: InodeNo) -> None:
        """Publish the draft *ino* under its temporary name, ahead of its rename by a server.

        What a server renames is whole, and the server may never close it. Publishing it first costs
        one transaction that must last, not two, as for a client that closes before it renames. If
        the rename is refused, the draft counts as not written for long: a later write is noticed.
        """
        opened, record = self._pool.open.inodes.get(ino), self._pool.index.inode_or_miss(ino)
        if opened is None or record is None or opened.torn or record.state != State.DRAFT:
            return
        if is_temporary(record.name) and opened.writers == opened.served_writers > 0:
            self._count_as_closed(opened)

    def renamed(self, ino: InodeNo) -> None:
        """Note the rename of *ino* by a server, after which no writer of the server's is left."""
        opened = self._pool.open.inodes.get(ino)
        if opened is not None and opened.served_writers:
            self._count_as_closed(opened)

    def run_due(self, now_s: float) -> None:
        """Count the handles of servers that wrote nothing for long as closed."""
        for _ in range(min(_LOOKS_A_TICK, len(self._written))):
            ino, watched = next(iter(self._written.items()))
            if watched.due_s > now_s:
                return
            del self._written[ino]
            opened = self._pool.open.inodes.get(ino)
            if opened is None or not opened.served_writers or opened.fd < 0:
                continue
            ctime_ns, idle_ns = self._idle(opened, watched)
            wait_s = self._pool.settings.file_server_close_s - idle_ns / _NS
            if wait_s > 0 or opened.allocating or opened.transfers:
                self._look_in(ino, wait_s, ctime_ns, idle_ns)
            else:
                self._count_as_closed(opened)

    def _look_in(self, ino: InodeNo, wait_s: float, ctime_ns: int = 0, idle_ns: int = 0) -> None:
        """Check *ino* again after *wait_s*; it was idle for *idle_ns* since its *ctime_ns*."""
        pool = self._pool
        wait_s = min(max(wait_s, 0.1), pool.settings.file_server_close_s)
        self._written[ino] = _Watched(
            pool.monotonic_s() + wait_s, ctime_ns, idle_ns, pool.age_clock.now_ns(), pool.clock_ns()
        )
        self._written.move_to_end(ino)

    def _idle(self, opened: OpenInode, watched: _Watched) -> tuple[int, int]:
        """Return the ctime, which no client can set, and for how long (ns) nobody wrote.

        The ctime is of the wall clock. If somebody set that since the last look, a block written
        meanwhile counts as written just now. Else it is not idle for longer than since that look.
        """
        pool = self._pool
        try:
            ctime_ns = pool.syscalls.fstat(opened.fd).st_ctime_ns
        except OSError as error:
            _log.warning("inode %#x: %s", opened.ino, error)
            return 0, 0
        went_by_ns = pool.age_clock.now_ns() - watched.age_ns
        now_ns = pool.clock_ns()
        if ctime_ns == watched.ctime_ns:
            return ctime_ns, watched.idle_ns + went_by_ns
        if abs(now_ns - watched.wall_ns - went_by_ns) > _SET_NS:
            return ctime_ns, 0
        return ctime_ns, min(max(now_ns - ctime_ns, 0), went_by_ns)

    def _count_as_closed(self, opened: OpenInode) -> None:
        """Count the servers' handles as readers'; if nobody else writes, publish. Atomic."""
        writers, handles = opened.quieten()
        self._pool.open.inodes.add_readers(opened, handles)
        for _ in range(writers):
            self._close_writer(opened)
        if not opened.writers:
            opened.need_not_ask()
            if not opened.transfers:
                opened.close_extent(self._pool.at_hand)  # readers need none, or open it again
        self._count_passing(opened)

    def close(self) -> None:
        """Look for late writes, because the pool stops; errors are only logged."""
        for opened in list(self._pool.open.inodes.values()):
            try:
                self.notice_late_write(opened)
            except (KvfsError, OSError) as error:
                _log.warning("inode %#x: %s", opened.ino, error)

    def notice_late_write_at(self, ino: InodeNo) -> None:
        """Call ``notice_late_write`` for inode *ino* if it is open. Raises what that raises."""
        opened = self._pool.open.inodes.get(ino)
        if opened is not None:
            self.notice_late_write(opened)

    def require_at_hand(self, opened: OpenInode) -> None:
        """Raise NotAtHand if ``notice_late_write`` would, before anything is changed for it."""
        if opened.quiet_writers and not opened.writers and opened.gone is None:
            self._require_told(opened)
            with contextlib.suppress(Damaged, OSError):  # it finds out itself
                self._pool.at_hand.require(opened.ino)

    def _require_told(self, opened: OpenInode) -> None:
        if opened.touches and self._pool.background.is_serving:
            raise NotAtHand.under_way("a trim, which changes the mtime", ino=opened.ino)

    def notice_late_write(self, opened: OpenInode) -> None:
        """Find out whether a server that counts as closed has written since. Atomic.

        If so, it is a writer again: one that appends if the block is longer now. Raises NoSpace,
        NotAtHand, OSError.
        """
        if not opened.quiet_writers or opened.writers or opened.gone is not None:
            return
        pool = self._pool
        self._require_told(opened)
        status = pool.at_hand.stat(opened.ino)
        record = pool.index.inode_or_miss(opened.ino)
        if status is None or record is None:
            return
        if (status.st_size, status.st_mtime_ns) == opened.left_as:
            return
        longer = status.st_size > record.size_bytes
        try:
            if opened.fd < 0:
                opened.open_extent(pool.at_hand.open(opened.ino, os.O_RDWR))
        except Damaged as error:
            self._publishing.dismiss(opened, error)
            return
        opened.write_late()
        pool.open.inodes.turn_writer(opened)
        opened.note_hand(Hand(SERVER, 0), appends=False)
        self._publishing.begin(opened, record, SERVER, appends=longer, late=True)
        self._look_in(opened.ino, self._pool.settings.file_server_close_s)


class Emptying:
    """Turns whole blocks that file servers empty into drafts."""

    def __init__(self, pool: Pool, allocator: Allocator, served: Served) -> None:
        self._pool = pool
        self._allocator = allocator
        self._served = served

    def is_due(self, ino: InodeNo, present: InodeRecord) -> bool:
        """Whether *ino* is whole, and no local process writes it or still may.

        A block that others write is emptied in place for all, as a log is.
        """
        if not present.size_bytes or present.state in HIDEABLE:
            return False
        opened = self._pool.open.inodes.get(ino)
        if opened is None:
            return True
        alone = not opened.writers or all(hand.maker == SERVER for hand in opened.hands)
        return alone and opened.gone is None

    def begin(self, opened: OpenInode) -> None:
        """Make a draft of *opened*, which the caller has open for writing and empties next.

        The index has the draft before a byte is dropped, so that after a kill it is a miss. Raises
        NoSpace, OSError.
        """
        pool, ino = self._pool, opened.ino
        record = pool.index.inode(ino)
        assert record is not None, "it has a name"
        # Atomic: no checkpoint from here until the caller has emptied it.
        draft = record._replace(
            state=after(State(record.state), Event.EMPTY),
            sequence=pool.counters.next_sequence,
            maker_tgid=SERVER.tgid,
            maker_birth=SERVER.birth,
        )
        with pool.change(pool.counters._replace(sequence=draft.sequence), begun=ino) as change:
            change.write(Changed(ino, record, draft, Why.REOPENED))
        opened.empty()
        opened.belong_to(SERVER)
        pool.open.notes.writing(opened)
        # New bytes go to new disk blocks, which the device gets after the identity's removal.
        opened.note_identity(lingers=False)
        self._served.keep_open(opened)
        pool.kernel.name_vanished(record.parent, record.name)

    def choose_course(self, opened: OpenInode) -> None:
        """Choose whether writers of *opened*, which is empty now, must ask for space."""
        pool, record = self._pool, self._pool.index.inode_or_miss(opened.ino)
        has_handles = opened.readers or opened.writers > _OWN_WRITERS
        if record is not None and not has_handles:
            self._allocator.choose_course(opened, record.parent)
        elif pool.kernel.writers_run_free and not opened.through_daemon:
            pool.open.inodes.let_run(opened)  # an open inode stays on its data path
