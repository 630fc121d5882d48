"""Identities of extents, directories, symlinks and fifos: written and removed off the hot path.

After a power loss the index is rebuilt from them (recovery.py). So only blocks whose bytes are
durable have one, and it is erased before the inode number is forgotten.
"""

import contextlib
import functools
import logging
import stat
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from kvfs.core.changed import Changed, Why
from kvfs.core.drives import ByDrive
from kvfs.core.errors import Damaged
from kvfs.core.inode_rules import identity_of
from kvfs.core.lifecycle import State, carries_identity
from kvfs.core.records import HAS_CRC, HAS_HOLES, OF_BYTES, AttributeRecord, Identity
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.pool.durable.attribute_records import AttributeRecords, is_quick
from kvfs.pool.durable.attribute_records import Change as AttributeChange
from kvfs.pool.durable.not_durable import UndurableBlocks
from kvfs.pool.space.drive import PoolDrive
from kvfs.storage.background import Background
from kvfs.storage.extents import Extents
from kvfs.storage.outliving import Lacks, UndurableTable

_log: Final = logging.getLogger(__name__)

R = TypeVar("R")

#: Its drive has new bytes of it, which are to become durable.
_BYTES_NEW: Final = frozenset({Why.CLOSED, Why.STORED, Why.RESTORED, Why.MOVED})


class Identities:
    """Writes and removes identities, in the background.

    An extent's identity is written only when its bytes are durable: by the durability pass
    (engine/durability/), which finds the block in ``not_durable``. So a block with an identity on
    the device is whole, and its identity may get another name or mode at once.
    """

    #: Not ``Why.RECONCILED``: that comes from the identities themselves.
    follows: Final = frozenset(
        {
            Why.CREATED,
            Why.RESTORED,
            Why.RESERVED,
            Why.CLOSED,
            Why.RENAMED,
            Why.STORED,
            Why.MOVED,
            Why.SET,
            Why.ATTRIBUTED,
        }
    )

    def __init__(
        self,
        extents: Extents,
        background: Background,
        drives: ByDrive[PoolDrive],
        not_durable: UndurableBlocks,
        attributes: AttributeRecords,
        memory: UndurableTable,
        monotonic_s: Callable[[], float],
    ) -> None:
        """*memory* outlives this server, and lists the identities that are queued here."""
        self._extents = extents
        #: Written before the identity that they belong to.
        self.attributes = attributes
        self._background = background
        self._drives = drives
        self.not_durable = not_durable
        self._memory = memory
        self._monotonic_s = monotonic_s
        #: Inodes whose identity was removed, but may be on the device until an fsync, a new
        #: identity or the unlink.
        self._lingering: set[InodeNo] = set()
        #: Inodes whose identity's removal is queued, or has failed, by the removal's number.
        self._withdrawing: dict[InodeNo, int] = {}
        self._withdrawals = 0
        #: The last job queued for each inode, until the device has done it.
        self._told: dict[InodeNo, object] = {}

    def follow(self, changed: Changed) -> None:
        """Queue the identity, or its removal, of an inode that has a name."""
        ino, record, why = changed.ino, changed.after, changed.why
        if record is None:
            return
        gained = changed.gained and (changed.before is None or why is Why.MOVED)
        attributed = why is Why.ATTRIBUTED or gained
        # Who finds the new identity takes the attributes beside it for right, the sweep, too.
        known = self.attributes
        if attributed or (
            known.lacks_older and known.may_lack(ino) and record.state != State.ALIAS
        ):
            self.note_attributes(ino)  # the identity is written after them
        if why in _BYTES_NEW:
            self.publish(ino, record)
        elif why is Why.RESERVED:
            self.withdraw(ino)
        else:
            self.write(ino, record)

    def publish(self, ino: InodeNo, record: InodeRecord) -> None:
        """Note that block *ino* was published: it gets an identity once its bytes are durable.

        Does nothing in a state without an identity (``carries_identity``), nor in memory.
        """
        if carries_identity(record) and not self._is_in_memory(ino):
            self._forget_queued(ino)
            self.not_durable.add(ino, record.size_bytes, self._monotonic_s())

    def write(self, ino: InodeNo, record: InodeRecord) -> None:
        """Queue *record*'s identity: its name or its attributes changed, and its bytes did not.

        Does nothing if it will be written anyway: by the pass, or after changed attributes.
        """
        if not carries_identity(record) or ino in self.not_durable or ino in self.attributes:
            return
        if self._is_in_memory(ino):
            return
        identity, target = identity_of(ino, record), record.target
        before = self._withdrawing.get(ino, 0)
        if stat.S_ISREG(record.mode):
            self._queue(
                ino,
                lambda: self._renew(ino, identity),
                lambda renewed: self._renewed(ino, identity, before, renewed=renewed),
            )
        else:
            work = functools.partial(self._extents.identify_node, ino, identity, target)
            self._queue(ino, work)

    def note_attributes(self, ino: InodeNo) -> None:
        """Queue *ino*'s attributes, which changed in the index, and then its identity."""
        if self.attributes.mark_changed(ino):
            self._background.submit(lambda: self._say_all(ino))

    def write_anew(self, ino: InodeNo, record: InodeRecord) -> None:
        """Queue *record*'s identity, which is missing or outdated, after its attributes.

        What is being written has none; the one that its close brings vouches for its attributes.
        """
        carries = carries_identity(record)
        if carries or self.attributes.may_lack(ino):
            self.note_attributes(ino)
        if not carries:
            self.withdraw(ino)

    def recall(self, done: Iterable[InodeNo]) -> None:
        """Take over what waited in the last server, with its age.

        *done*: the inodes that it changed last. It may have died before it noted them in the table.
        """
        rows = self._memory.rows()
        waiting = [row for row in rows if row.lacks is Lacks.BYTES]
        self.not_durable.recall(row for row in waiting if not self._is_in_memory(row.ino))
        changed = [row for row in rows if row.lacks is Lacks.ATTRIBUTES]
        self.attributes.recall(changed, self._memory.flush_since_s)
        for row in changed:
            self._background.submit(functools.partial(self._say_all, row.ino))
        queued = [row.ino for row in rows if row.lacks is Lacks.IDENTITY]
        for ino in dict.fromkeys((*queued, *done)):
            record = self.attributes.record(ino)
            if record is None:
                self._memory.drop(Lacks.IDENTITY, ino)
            elif ino in self.not_durable and carries_identity(record):
                self.note_attributes(ino)
            else:
                try:
                    self.write_missing(ino, record)
                except OSError as error:  # its next open reports it
                    _log.warning("inode %#x: its file is broken: %s", ino, error.strerror)

    def write_missing(self, ino: InodeNo, record: InodeRecord) -> None:
        """Queue *record*'s identity, which may be missing, after its attributes. Raises OSError.

        A block without an identity is in ``not_durable`` on return, so that whoever waits for all
        blocks there waits for it, too.
        """
        if carries_identity(record) and stat.S_ISREG(record.mode) and self._present(ino) is None:
            self.publish(ino, record)
        self.write_anew(ino, record)

    def _say_all(self, ino: InodeNo, *, at_once: bool = False) -> None:
        """Write *ino*'s attributes, and then its identity; large attributes in the other thread."""
        change, record = self.attributes.change_of(ino), self.attributes.record(ino)
        # It is already written, the inode is gone, or its drive has failed.
        if change is None or record is None or self._drives.of(ino).has_failed:
            self.attributes.forget(ino)
            return
        attributes = self.attributes.present(ino, record)
        if attributes is None:
            self._attributes_written(ino, change, kept=False)
            return
        if at_once or is_quick(attributes):
            self._background.of(ino).device.submit(
                lambda: self.attributes.write(attributes, record),
                lambda kept: self._attributes_written(ino, change, kept=kept),
            )
        else:
            write = functools.partial(self._write_long, attributes, record, change)
            self._background.submit_long(write, ino)

    def _write_long(
        self, attributes: AttributeRecord, record: InodeRecord, change: AttributeChange
    ) -> None:
        """Write *attributes* in the thread; then the loop writes the identity."""
        kept = self.attributes.write(attributes, record)
        self._background.hand_over(
            lambda: self._attributes_written(attributes.ino, change, kept=kept)
        )

    def _attributes_written(self, ino: InodeNo, change: AttributeChange, *, kept: bool) -> None:
        """Write the identity that belongs to the attributes just written. Raises OSError."""
        if not self.attributes.note_written(ino, change, kept=kept):
            self._background.submit(lambda: self._say_all(ino))  # there was another change since
            return
        record = self.attributes.record(ino)
        if record is not None:
            self.write(ino, record)
            self._background.carry_out(ino)

    def _renew(self, ino: InodeNo, identity: Identity) -> bool:
        """Replace the identity of a block, in the device's thread; False if it has none."""
        present = self._present(ino)
        if present is None:
            return False
        flags = identity.flags | (present.flags & OF_BYTES)
        renewed = identity._replace(flags=flags, content_crc=present.content_crc)
        self._extents.identify(ino, renewed)
        return True

    def _renewed(self, ino: InodeNo, identity: Identity, before: int, *, renewed: bool) -> None:
        """Note that the identity was replaced; else its bytes must become durable first."""
        if renewed:
            self._note_written(ino, before)
        elif ino not in self._withdrawing and ino not in self.not_durable:
            record = self.attributes.record(ino)
            if record is not None and carries_identity(record):
                self.not_durable.add(ino, identity.size_bytes, self._monotonic_s())

    def _present(self, ino: InodeNo) -> Identity | None:
        with contextlib.suppress(Damaged):
            return self._extents.identity(ino)
        return None

    def write_durable(
        self,
        ino: InodeNo,
        record: InodeRecord,
        *,
        has_holes: bool,
        content_crc: int | None = None,
        fd: int | None = None,
        end: Callable[[Exception | None], None] | None = None,
    ) -> None:
        """Write the identity of a block whose bytes are durable. Raises NoSpace, OSError.

        *content_crc* is the CRC32C of its bytes, None if there is none (extent_bytes.py).
        *fd*, if the extent is open anyway, halves the cost. *end* is called on the loop with what
        was raised, if requests are served.
        """
        identity = identity_of(ino, record)
        if has_holes:
            identity = identity._replace(flags=identity.flags | HAS_HOLES)
        if content_crc is not None:
            flags = identity.flags | HAS_CRC
            identity = identity._replace(flags=flags, content_crc=content_crc)
        if ino in self.attributes:
            self._say_all(ino, at_once=True)
        self._forget_queued(ino)
        before = self._withdrawing.get(ino, 0)

        def ended(_: bool) -> None:
            self._note_written(ino, before)
            if end is not None:
                end(None)
            present = self.attributes.record(ino) if self._background.is_serving else None
            if present is not None and present.sequence != record.sequence:
                self.write(ino, present)  # it was renamed meanwhile, say

        write = functools.partial(self._extents.identify, ino, identity, fd=fd)
        self._background.of(ino).device.submit(write, ended, failed=end)

    def _is_in_memory(self, ino: InodeNo) -> bool:
        """Whether *ino*'s bytes are in memory only: it has no identity, until it moves."""
        memory = self._extents.memory
        return memory is not None and ino in memory

    def is_said(self, ino: InodeNo, record: InodeRecord) -> bool:
        """Whether the device may have an identity of *ino*, the present or a former one."""
        if self.was_identified(ino):
            return True
        listed = ino in self.not_durable or self._is_in_memory(ino)
        return carries_identity(record) and not listed

    def say_now(self, ino: InodeNo) -> None:
        """Do the queued work for *ino* now, except what waits for its bytes. Raises OSError."""
        if ino in self.attributes:
            self._say_all(ino, at_once=True)
        self._background.carry_out(ino)

    def withdraw(self, ino: InodeNo) -> None:
        """Queue the removal of an extent's identity, because its bytes are about to change."""
        self.not_durable.remove(ino)
        self._queue(ino, lambda: self._extents.unidentify(ino), self._begin_withdrawal(ino))

    def was_identified(self, ino: InodeNo) -> bool:
        """Whether *ino*'s identity was or will be removed, but may still be on the device."""
        return ino in self._lingering or ino in self._withdrawing

    def withdraw_now(self, ino: InodeNo) -> bool:
        """Remove an extent's identity; return whether the device may still have it. Raises OSError.

        If True, fsync the extent to make the removal durable, and then call ``forgotten``. While
        requests are served the device's thread removes it, and only afterwards ``was_identified``
        tells that.
        """
        self.not_durable.remove(ino)
        self._forget_queued(ino)
        device, end = self._background.of(ino).device, self._begin_withdrawal(ino)
        device.submit(lambda: self._extents.unidentify(ino), end)
        return self.was_identified(ino)

    def recall_withdrawn(self, ino: InodeNo) -> None:
        """Note that the last server removed *ino*'s identity, perhaps without an fsync."""
        self._lingering.add(ino)

    def forgotten(self, ino: InodeNo) -> None:
        """Note that *ino*'s extent was fsynced after the removal of its identity."""
        self._lingering.discard(ino)

    def erase(self, ino: InodeNo, record: InodeRecord) -> None:
        """Queue the removal of all files of *record*'s inode on the device."""
        self.not_durable.remove(ino)
        self.attributes.forget(ino)
        self._forget_queued(ino)
        self._lingering.discard(ino)
        self._withdrawing.pop(ino, None)
        drive = self._drives.of(ino)
        if drive.has_failed:
            if self._is_in_memory(ino):
                self._extents.unlink(ino)  # its threads may never come to it
            return
        if stat.S_ISREG(record.mode):
            remove = functools.partial(self._extents.unlink, ino)
            in_use = functools.partial(self._extents.is_used, ino)
            drive.unlink_queue.add(remove, record.allocated_bytes, in_use)
        elif carries_identity(record):
            forget = functools.partial(self._extents.forget_node, ino)
            device = self._background.of(ino).device
            self._background.submit(lambda: device.submit(forget))

    def _queue(
        self, ino: InodeNo, work: Callable[[], R], end: Callable[[R], None] | None = None
    ) -> None:
        """Queue *work*, which writes or removes *ino*'s identity; note it for the next server."""
        if self._drives.of(ino).has_failed:
            return
        self.foretell(ino)
        self._told[ino] = work

        def done(result: R) -> None:
            if end is not None:
                end(result)
            if self._told.get(ino) is work:
                del self._told[ino]
                self._memory.drop(Lacks.IDENTITY, ino)

        device = self._background.of(ino).device
        self._background.identify(ino, lambda: device.submit(work, done))

    def foretell(self, ino: InodeNo) -> None:
        """Note for the next server, before the index changes, that *ino* needs another identity."""
        self._memory.put(Lacks.IDENTITY, ino, self._monotonic_s())

    def _forget_queued(self, ino: InodeNo) -> None:
        if self._told.pop(ino, None) is not None:  # else no job is queued
            self._background.forget(ino)
        self._memory.drop(Lacks.IDENTITY, ino)

    def _begin_withdrawal(self, ino: InodeNo) -> Callable[[bool], None]:
        """Note that *ino*'s identity is being removed; return what follows that."""
        self._withdrawals = number = self._withdrawals + 1
        self._withdrawing[ino] = number

        def end(lingers: bool) -> None:
            if lingers and ino in self._withdrawing:  # else it was erased
                self._lingering.add(ino)
            self._end_withdrawal(ino, number)

        return end

    def _end_withdrawal(self, ino: InodeNo, number: int) -> None:
        if self._withdrawing.get(ino) == number:
            del self._withdrawing[ino]

    def _note_written(self, ino: InodeNo, before: int) -> None:
        """Note that *ino* has an identity; *before*: the removal that it follows, or 0."""
        self._lingering.discard(ino)  # it was overwritten, so the next removal starts from this one
        self._end_withdrawal(ino, before)
