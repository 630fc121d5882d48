"""Open blocks at both ends of a server: as another one left them, and when the pool stops.

A server that takes a mount over makes open inodes again from handles, index, extents and notes.
None of them was closed, so the kernel and the clients go on as if nothing had happened. A block
that is being written goes on being written by the same process; an inode without a name keeps its
bytes for those who have it open. For what nobody has open see recovery/recovery.py.
"""

import contextlib
import logging
import os
import stat
from typing import Final

from kvfs.core.errors import Damaged
from kvfs.core.lifecycle import UNFINISHED, State
from kvfs.core.types import SECOND_NS, InodeNo, InodeRecord
from kvfs.engine.blocks.blocks import Blocks
from kvfs.engine.blocks.publishing import Closing
from kvfs.machine.process_ends import Fate
from kvfs.machine.processes import Maker
from kvfs.pool.departures import REMOVED_KEPT_S
from kvfs.pool.open.open_inodes import Hand, OpenInode
from kvfs.pool.open.open_notes import UNTOLD, Living, LivingHandle, NotedClose
from kvfs.pool.pool import Pool

_log: Final = logging.getLogger(__name__)

#: States in which a block is torn if its writer dies.
_UNWHOLE: Final = UNFINISHED | {State.REWRITE, State.RENAMED}


class TakenOver:
    """Makes the open inodes of one pool again."""

    def __init__(self, pool: Pool, blocks: Blocks) -> None:
        self._pool = pool
        self._blocks = blocks

    def recall(self, living: Living, kept: set[InodeNo]) -> None:
        """Open what the *living* handles have open; *kept*: unfinished inodes. Raises OSError."""
        pool, closes = self._pool, dict(self._pool.open.notes.all_closes())
        for ino in kept:
            record = pool.index.inode_or_miss(ino)
            if record is not None and record.state in _UNWHOLE | {State.SLAB}:
                pool.unfinished.add(ino)
        by_inode = living.by_inode()
        for ino in by_inode.keys() | closes.keys():
            self._open(ino, by_inode.get(ino, []), closes.get(ino, []))
        self._blocks.truncating.recall()
        self._recall_removed()
        for ino in pool.open.notes.all_written() - pool.open.inodes.keys():
            pool.open.notes.forget(ino)

    def _open(self, ino: InodeNo, handles: list[LivingHandle], closes: list[NotedClose]) -> None:
        pool = self._pool
        noted = None
        record = pool.index.inode_or_miss(ino)
        if record is None:
            noted = pool.open.notes.nameless(ino)
            if noted is None and not handles:
                return  # it is gone, and with it the doubt
        opened = OpenInode(ino)
        for handle in handles:
            for _ in range(handle.opens):
                opened = pool.open.inodes.enter(ino, writer=handle.writer)
        for _ in closes:
            opened = pool.open.inodes.enter(ino, writer=True)
        if record is None and noted is not None:
            record, attributes = noted
            opened.lose_name(record)
            opened.keep_attributes(attributes)
            pool.space.of(ino).extra_bytes += record.allocated_bytes
        if record is None:
            opened.revoke()  # its record was lost: whatever is asked of it is ESTALE
            return
        opened.hold(record.allocated_bytes)
        if not stat.S_ISREG(record.mode):
            return
        if opened.writers:
            self._write(opened, record, [handle for handle in handles if handle.writer])
        for handle in handles:
            if handle.served:
                for _ in range(handle.opens):
                    self._blocks.served.opened(opened, writer=handle.writer, passing=handle.passing)
        for close in closes:
            self._recall_close(opened, close)

    def _recall_close(self, opened: OpenInode, close: NotedClose) -> None:
        """Carry out a writer's *close* that another server answered."""
        if close == UNTOLD:
            self._blocks.last_closes.put_off(opened)
            return
        maker, fate = Maker(close.tgid, close.birth), Fate(close.fate)
        closing = Closing(close.tid, maker, fate, close.at_s, close.size_bytes, close.mtime_ns)
        self._blocks.doubts.keep_in_doubt(opened, closing)

    def _write(self, opened: OpenInode, record: InodeRecord, writers: list[LivingHandle]) -> None:
        """Set what is known of *opened*, which is being written."""
        pool, state = self._pool, State(record.state)
        try:
            opened.open_extent(pool.extents.open(opened.ino, os.O_RDWR))
        except Damaged as error:
            self._blocks.publishing.dismiss(opened, error)
            return
        status = pool.syscalls.fstat(opened.fd)
        opened.note_allocated(pool.extents.allocated_bytes(opened.fd), pool.space.of(opened.ino))
        if state in UNFINISHED:
            opened.foresee(record.parent)
        pool.open.notes.recall(opened, state)
        if state is State.REWRITE and record.size_bytes:
            pool.durable.identities.recall_withdrawn(opened.ino)
            opened.note_identity(lingers=True)
        first = writers[0].maker if writers else Maker(record.maker_tgid, record.maker_birth)
        opened.belong_to(first)
        for handle in writers:
            opened.recall_hand(Hand(handle.maker, handle.thread), appends=handle.appends)
            if handle.flushed:
                opened.recall_flush(handle.flushed_as)
        opened.look_for_holes(status.st_size)
        if opened.emptied:  # by a file server, which may have closed it
            self._blocks.served.keep_open(opened)
        if not pool.kernel.writers_run_free:
            return
        if not any(handle.passing for handle in writers):
            opened.must_ask()
        elif state in UNFINISHED:
            pool.open.inodes.let_run(opened)

    def _recall_removed(self) -> None:
        """Keep inodes that lost their name a moment ago, and erase those that lost it earlier."""
        pool, now_ns = self._pool, self._pool.clock_ns()
        for ino in pool.open.notes.all_nameless():
            if ino in pool.open.inodes:
                continue
            noted = pool.open.notes.nameless(ino)
            if noted is None or pool.index.knows(ino):
                pool.open.notes.end(ino)
                continue
            record = noted[0]
            if 0 <= now_ns - record.ctime_ns < REMOVED_KEPT_S * SECOND_NS:
                pool.space.of(ino).extra_bytes += record.allocated_bytes
                pool.departures.removed.keep(ino, record, pool.monotonic_s())
            else:
                pool.open.notes.end(ino)
                pool.durable.identities.erase(ino, record)


def close_all(pool: Pool, blocks: Blocks, *, all_closed: bool = False) -> bool:
    """Close every handle; False if a block could not be published and stays a draft.

    A draft that is still being written is not whole: its name is removed, and its writer gets an
    error at the next call. A block in rewrite loses its name too if its client can write on without
    a server (passthrough). With *all_closed* both keep it, because only the RELEASE was lost.
    """
    blocks.doubts.close()
    blocks.served.close()
    closed = blocks.last_closes.forget_all()
    blocks.truncating.close()
    settled = True
    for opened in list(pool.open.inodes.values()):
        if opened.ino not in closed:
            if opened.kept_open or not (all_closed and opened.flushed):
                opened.spoil()
            try:
                if opened.torn and not all_closed and _outlives(pool, blocks, opened):
                    opened.outlive()
            except OSError as error:
                _log.warning("inode %#x stays open in the index: %s", opened.ino, error)
                settled = False  # the next start decides, as after a kill
        for _ in range(opened.readers):
            blocks.close(opened, writer=False)
        for _ in range(opened.writers):
            blocks.close(opened, writer=True)
    return blocks.last_closes.end() and settled


def _outlives(pool: Pool, blocks: Blocks, opened: OpenInode) -> bool:
    """Whether a client of the ended mount can still write to the extent.

    Call it before the extent is measured, because a client that has just closed may have
    written until then. After an OSError the extent cannot be measured.
    """
    if opened.fd < 0:
        return False
    opened.close_extent(pool.at_hand)  # our own descriptor would count as a user
    outlives = pool.extents.is_written(opened.ino)
    with contextlib.suppress(Damaged):  # then its name was removed
        blocks.extent_fd(opened)
    return outlives
