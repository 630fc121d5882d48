"""The pass that makes the published blocks of one drive durable, and only then identifies them.

A batch goes through four steps: it is gathered on the loop, its bytes are waited for in a thread
(batch.py), its identities are written on the loop, and the flush of the next batch makes those
durable, too. No request waits for any of them, unless it asks to (``DurableGoal``).
"""

import errno
import functools
import logging
from collections import deque
from typing import Final

from kvfs.core.durable_pace import Pace
from kvfs.core.errors import KvfsError
from kvfs.core.lifecycle import carries_identity
from kvfs.core.types import InodeNo
from kvfs.engine.blocks.publishing import Publishing
from kvfs.engine.durability.batch import STEP, DeviceSync, Done, DurableBatch, OpenBlock, Synced
from kvfs.pool.pool import Pool
from kvfs.pool.space.drive import PoolDrive

_log: Final = logging.getLogger(__name__)

#: Blocks that may still be written are looked at again after this time, so many at once.
_HELD_S: Final = 1.0
_HELD_LOOKS: Final = 64
#: A wait counts as given up if its caller has not asked for this long.
_ASKED_S: Final = 2.0
#: Errors of the machine's state, which say nothing about the bytes.
_AGAIN: Final = frozenset({errno.EINTR, errno.EAGAIN, errno.ENOMEM, errno.ENFILE, errno.EMFILE})


class DrivePass:
    """The pass of one drive. Everything but the thread's work runs on the loop's thread."""

    def __init__(self, pool: Pool, publishing: Publishing, drive: PoolDrive) -> None:
        self._pool = pool
        self._publishing = publishing
        self.drive: Final = drive
        self._drive = drive.number
        self._pool_fd = pool.device.pool_fds[drive.number]
        self._not_durable = pool.durable.not_durable
        self._queue = pool.durable.not_durable.queues.all[drive.number]
        self._attributes = pool.durable.identities.attributes
        self._sync = DeviceSync(
            self._pool_fd,
            pool.syscalls,
            pool.device.fs_type,
            pool.durable.final_checksum,
            pool.settings.checksum_share / len(pool.space.drives.all),
            lambda: pool.background.hand_over(self._collect),
        )
        self._pace = Pace(pool.settings.durable_within_s)
        self._batch = DurableBatch(
            *(pool.durable, pool.open.inodes, pool.background), self._queue, self._start
        )
        #: Whether it waits for the thread; results wait in ``_judged``.
        self._waits = False
        #: How many identities are being written.
        self._writing = 0
        self._judged: deque[tuple[OpenBlock, Synced]] = deque()
        #: Blocks whose identities the flush under way makes durable.
        self._flushing = self._queue.identified()
        #: Blocks whose bytes are lost and whose names could not be removed yet.
        self._lost = list[InodeNo]()
        self._asked_until_s = 0.0
        self._flush_wanted = 0
        self._looked_at_held_s = 0.0
        #: The last sequence number seen, and when (s) clients stored last.
        self._seen, self._stored_s = pool.counters.sequence, 0.0
        self._flushes_begun = 0
        self.flushes = self.marked = self.late = self.failures = 0
        #: Blocks that got a checksum, and those whose pages had left the cache before.
        self.checksums = self.unchecked = 0

    # ---- those who wait ----

    def ask(self, now_s: float) -> None:
        """Do all that is left at once, because somebody waits."""
        self._asked_until_s = now_s + _ASKED_S

    def rest(self) -> None:
        """Hurry no more; a caller that still waits will ask again."""
        self._asked_until_s = 0.0

    def want_flush(self) -> int:
        """Have a flush begin after this moment; return what ``flushes`` is when it has ended."""
        self._flush_wanted = self._flushes_begun + 1
        return self._flush_wanted

    # ---- the steps ----

    def run_due(self, now_s: float) -> None:
        """Go on with what is due; some microseconds if nothing is."""
        self._look_again(now_s)
        self._drop_lost()
        self._collect()
        if not self._is_at_work:
            self._begin(now_s)

    @property
    def _is_at_work(self) -> bool:
        return bool(self._waits or self._batch.gathers or self._judged or self._writing)

    def _collect(self) -> None:
        """Take the batch that the thread has ended, if any, without waiting for the next tick."""
        done = self._sync.pop_result() if self._waits else None
        if done is not None:
            self._judge(done, self._pool.monotonic_s())

    def _begin(self, now_s: float) -> None:
        """Begin a batch that is due, or a flush alone."""
        urgent, busy = now_s < self._asked_until_s, self._is_busy(now_s)
        first = self._queue.next_due()
        if first is not None and self._pace.is_due(
            now_s, first[1].since_s, busy=busy, urgent=urgent
        ):
            self._batch.begin(self._pace.due_before_s(now_s, busy=busy, urgent=urgent))
            return
        waiting = (
            self._queue.first_identified_since_s(),
            self._attributes.written_since_s(self._drive),
        )
        since_s = min((since_s for since_s in waiting if since_s is not None), default=None)
        if (urgent and self._flush_wanted > self.flushes) or (
            since_s is not None and self._pace.is_due(now_s, since_s, busy=False, urgent=urgent)
        ):
            self._start()

    def _is_busy(self, now_s: float) -> bool:
        """Whether clients store, or did a moment ago."""
        pool = self._pool
        if pool.counters.sequence != self._seen or pool.open.inodes.written:
            self._seen, self._stored_s = pool.counters.sequence, now_s
        return now_s - self._stored_s < _HELD_S

    def _start(self) -> None:
        """Let the thread wait for the batch, and flush."""
        self._flushing = self._queue.identified()
        self._attributes.begin_flush(self._drive)
        self._flushes_begun += 1
        self._waits = True
        self._sync.start(self._batch.descriptors)

    def _judge(self, done: Done, now_s: float) -> None:
        """Note what the thread found out."""
        self._waits = False
        self._pace.note_ended(now_s, done.took_s, full=self._batch.is_full)
        batch = self._batch.take_all()
        failed = done.flush_error is not None or self._is_dead(done)
        self._attributes.end_flush(self._drive, failed=failed)
        if failed:
            _log.error("the device failed to flush: %s", done.flush_error)
            self.failures += 1
            self._pool.durable.syncs.failed.add(self._drive)  # the kernel reports it once
            for block in batch:
                self._put_back(block)
            self._flushing = []
            return
        self.flushes = self._flushes_begun
        for ino, waiting in self._flushing:
            if self._not_durable.leave(ino, waiting):
                self.marked += 1
                self.late += self._pace.is_late(now_s - waiting.since_s)
        self._flushing = []
        self._judged.extend(zip(batch, done.blocks, strict=True))
        if self._judged:
            self._pool.background.submit(self._identify)

    def _is_dead(self, done: Done) -> bool:
        """Whether the errors are those of a file system that has shut itself down."""
        if not any(block.error for block in done.blocks):
            return False
        try:
            self._pool.syscalls.statvfs(self._pool_fd)
        except OSError:
            return True
        return False

    def _identify(self) -> None:
        """Write the identities of some blocks whose bytes are durable."""
        for _ in range(min(STEP, len(self._judged))):
            block, synced = self._judged.popleft()
            try:
                self._settle(block, synced)
            finally:
                self._close(block)
        if self._judged:
            self._pool.background.submit(self._identify)
        elif not self._is_at_work:
            self._begin(self._pool.monotonic_s())  # the next batch, if it is due

    def _settle(self, block: OpenBlock, synced: Synced) -> None:
        """Mark one block durable, or drop it. Atomic: no checkpoint since the look at it."""
        pool, ino = self._pool, block.ino
        if synced.error is not None and synced.error.errno not in _AGAIN:
            # Even if it was published anew since, as the kernel reports the error only once.
            self._not_durable.remove(ino)
            self.failures += 1
            _log.error("inode %#x lost: the device failed to write it: %s", ino, synced.error)
            self._lost.append(ino)
            self._drop_lost()
            return
        if not self._queue.is_taken(ino, block.waiting):
            return  # written, published anew or removed since
        record, opened = pool.index.inode_or_miss(ino), pool.open.inodes.get(ino)
        writes = opened is not None and opened.writers
        if record is None or not carries_identity(record) or writes:
            self._not_durable.remove(ino)
            return
        if synced.error is not None:
            self._queue.put_back(ino)
            return
        end = functools.partial(self._identified, block, synced)
        self._writing += 1
        try:
            pool.durable.identities.write_durable(
                ino,
                record,
                has_holes=synced.has_holes,
                content_crc=synced.content_crc,
                fd=block.fd,
                end=end,
            )
        except (KvfsError, OSError) as error:
            end(error)

    def _identified(self, block: OpenBlock, synced: Synced, error: Exception | None) -> None:
        """Note that the identity of *block* was written, or why not. Atomic."""
        ino = block.ino
        self._writing -= 1
        if not self._queue.is_taken(ino, block.waiting):
            return  # written, published anew or removed meanwhile
        if error is not None:
            _log.warning("inode %#x: its identity is not written yet: %s", ino, error)
            self._queue.put_back(ino)
            return
        self._queue.note_identified(ino)
        self.checksums += synced.content_crc is not None
        self.unchecked += synced.content_crc is None

    def _close(self, block: OpenBlock) -> None:
        self._pool.durable.final_bytes.close(block.ino, block.fd)

    def _put_back(self, block: OpenBlock) -> None:
        self._close(block)
        if self._queue.is_taken(block.ino, block.waiting):
            self._queue.put_back(block.ino)

    def _drop_lost(self) -> None:
        """Remove the names of lost blocks; what fails is tried again at the next tick."""
        for ino in list(self._lost):
            try:
                self._publishing.dismiss_lost(ino)
            except (KvfsError, OSError) as error:
                _log.warning("inode %#x: its name stays for now: %s", ino, error)
                return
            self._lost.remove(ino)

    def _look_again(self, now_s: float) -> None:
        """Look again at blocks that somebody could write the last time."""
        if now_s - self._looked_at_held_s >= _HELD_S and self._queue.held:
            self._looked_at_held_s = now_s
            self._queue.look_again(_HELD_LOOKS)

    # ---- the end ----

    def close(self) -> None:
        """Wait for the thread, and put its blocks back. Identities that were written stay."""
        self._sync.close()
        for block in [*self._batch.stop(), *(block for block, _ in self._judged)]:
            self._put_back(block)
        self._waits = False
        self._judged.clear()
