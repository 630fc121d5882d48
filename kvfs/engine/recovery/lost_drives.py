"""Drives that failed or are missing: what they held are misses at once; rows go in batches.

The pool serves on without them, as long as one is left. A lookup of a block that was there takes
its row away, and finds a miss. All other rows go beside the requests, some at a time; the kernel is
told of each as of an eviction. Drafts there have an open writer, who gets the drive's errors: they
lose their names first, with all else that is open. What has no bytes, a directory say, is in the
index, and stays.
"""

import functools
import logging
import stat
from collections.abc import Callable, Sequence
from typing import Final

from kvfs.core.changed import Why
from kvfs.core.lifecycle import State
from kvfs.core.records import INODE_PREFIX, inode_key, parse_inodes
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.engine.blocks.publishing import Publishing
from kvfs.engine.names.namespace import Proofs
from kvfs.engine.names.tree_change import TreeChange
from kvfs.pool.pool import Pool
from kvfs.pool.space.drive import PoolDrive
from kvfs.storage.outliving import FAILED_DRIVES

_log: Final = logging.getLogger(__name__)

#: Rows in one step, some 60 us each for those that go; a step runs between two requests.
_STEP: Final = 32


def _has_bytes(record: InodeRecord) -> bool:
    return stat.S_ISREG(record.mode) and record.state != State.ALIAS


class LostNames:
    """Asked before a name is used: a name of a failed drive leads nowhere. It is ``Proofs``."""

    def __init__(self, pool: Pool, others: Proofs) -> None:
        """*others* are asked about the inodes of drives that serve."""
        self._pool = pool
        self._others = others
        #: The drives whose rows are not all gone.
        self.going: Final[list[PoolDrive]] = []
        #: Whether the index may be wrong about any inode; ``prove`` takes it back.
        self.in_doubt = others.in_doubt

    def begin(self, drive: PoolDrive) -> None:
        """Note that *drive* has failed."""
        self.going.append(drive)
        self.in_doubt = True

    def prove(self, ino: InodeNo) -> bool:
        """Return whether the index was right about *ino*, else correct it.

        What is open is right until its turn comes (``LostDrives``). Raises NoSpace, NotAtHand,
        OSError.
        """
        self.in_doubt = self._others.in_doubt or bool(self.going)
        if not self.is_lost(ino):
            return self._others.prove(ino)
        record = self._pool.index.inode_or_miss(ino)
        if record is None or ino in self._pool.open.inodes:
            return True
        if not _has_bytes(record):
            return self._others.prove(ino)
        self.drop([(ino, record)])
        return False

    def is_lost(self, ino: InodeNo) -> bool:
        """Whether *ino*'s file was on a failed drive whose rows are going."""
        return bool(self.going) and self._pool.space.drives.of(ino) in self.going

    def drop(self, batch: Sequence[tuple[InodeNo, InodeRecord]]) -> None:
        """Remove blocks that nobody has open, and tell the kernel. Raises NoSpace, OSError."""
        pool = self._pool
        with TreeChange(pool, pool.clock_ns()) as change:
            for ino, record in batch:
                change.unlink(ino, record, Why.LOST)
        for ino, record in batch:
            pool.durable.identities.erase(ino, record)
            pool.kernel.unnamed(ino)
            pool.kernel.inode_vanished(ino, record.parent)
        pool.lost_blocks += len(batch)


class LostDrives:
    """Gives drives up, and takes away the rows of what they held."""

    def __init__(self, pool: Pool, publishing: Publishing, names: LostNames) -> None:
        self._pool = pool
        self._publishing = publishing
        self._names = names
        self._after = b""

    def give_up(self, drive: PoolDrive, why: str) -> None:
        """Use *drive* no more, which has failed because of *why*."""
        _log.critical("drive %d has failed: %s; its blocks are misses", drive.number, why)
        drive.probe.give_up(why)
        self._go_on_without(drive)
        pool = self._pool
        pool.notes.put(FAILED_DRIVES, {**(pool.notes.get(FAILED_DRIVES) or {}), drive.number: why})
        for other in pool.space.serving if not pool.settings.read_only else ():
            note = functools.partial(pool.run.note_lost, other.number, pool.age_clock.base_ns)
            pool.background.submit_long(functools.partial(self._write_note, note), other.ino)

    def _write_note(self, note: Callable[[], None]) -> None:
        """Do *note*, which writes RUN, in any thread. Raises OSError."""
        note()
        put_stamp = self._pool.durable.undurable.put_stamp
        self._pool.background.hand_over(lambda: put_stamp(self._pool.run.stamp))

    def give_up_missing(self) -> None:
        """Use the drives no more that the pool lacks since its start."""
        for device in self._pool.device.missing:
            self._go_on_without(self._pool.space.drives.all[device.header.drive])

    def _go_on_without(self, drive: PoolDrive) -> None:
        pool = self._pool
        pool.extents.lost.add(drive.number)
        pool.numbers.give_up(drive.number)
        pool.durable.identities.attributes.give_up(drive.number)
        pool.open.ready.on(drive).give_up()
        if pool.settings.read_only:
            return  # no row may go: an open of such a block finds that its extent is not there
        self._names.begin(drive)
        if len(self._names.going) == 1:
            self._begin()

    def _begin(self) -> None:
        self._after = inode_key(self._names.going[0].ino)
        self._pool.background.submit_leisure(self._drop_open)

    def _drop_open(self) -> None:
        """Take the names of what is open, some at a time. Raises NoSpace, OSError."""
        named = [ino for ino, opened in self._pool.open.inodes.items() if opened.gone is None]
        lost = [ino for ino in named if self._is_going(ino)]
        for ino in lost[:_STEP]:
            self._publishing.dismiss_lost(ino)
        leisure = self._pool.background.submit_leisure
        leisure(self._drop_open if lost[_STEP:] else self._drop_some)

    def _drop_some(self) -> None:
        """Take away the next rows of the drive. Raises NoSpace, OSError."""
        pool = self._pool
        rows = next(pool.index.walk(INODE_PREFIX, _STEP, after=self._after), [])
        found = [(ino, record) for ino, record in parse_inodes(rows) if self._is_going(ino)]
        batch = [
            (ino, record) for ino, record in found if record is not None and _has_bytes(record)
        ]
        opened = [ino for ino, _ in batch if ino in pool.open.inodes]
        for ino in opened:
            self._publishing.dismiss_lost(ino)
        closed = [(ino, record) for ino, record in batch if ino not in opened]
        if closed:
            self._names.drop(closed)
        if found:
            self._after = inode_key(found[-1][0])
            pool.background.submit_leisure(self._drop_some)
            return
        drive = self._names.going.pop(0)
        _log.warning("drive %d: all that it held is forgotten", drive.number)
        if self._names.going:
            self._begin()

    def _is_going(self, ino: InodeNo) -> bool:
        return self._pool.space.drives.of(ino) is self._names.going[0]
