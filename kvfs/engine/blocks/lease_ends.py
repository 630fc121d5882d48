"""The end of a lease: what happens to a block when its maker has ended, or its time is over.

A process that was not killed has written what it meant to write. But a client of an NFS server may
have died in the middle of a store, which kvfs cannot see. So what a server wrote counts as whole
only if no part of it is missing.
"""

import functools
import logging
import os
from typing import Final

from kvfs.core.changed import Changed, Why
from kvfs.core.errors import Damaged, KvfsError
from kvfs.core.lifecycle import HELD, Event, State, after, is_temporary
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.engine.names.namespace import Namespace
from kvfs.engine.names.tree_change import end_alias
from kvfs.machine.processes import NO_DESCRIPTOR, SERVER
from kvfs.pool.pool import Pool
from kvfs.storage.extent_bytes import lacks_bytes

_log: Final = logging.getLogger(__name__)

#: Most blocks that wait for the thread, which checks one after the other.
_LOOKS_MAX: Final = 256


class LeaseEnds:
    """Ends the leases of one pool."""

    def __init__(self, pool: Pool, namespace: Namespace) -> None:
        self._pool = pool
        self._namespace = namespace
        #: Blocks that are being checked.
        self._looking: set[InodeNo] = set()
        #: Blocks of servers that lost their name because a part of them was missing, or might be.
        self.unproven = 0

    def end(self, ino: InodeNo) -> bool:
        """End the lease of *ino*: publish it, make it an orphan, or remove its name, or an alias.

        Return False if that cannot be decided yet.
        """
        pool = self._pool
        record = pool.index.inode_or_miss(ino)
        if record is not None and record.state == State.ALIAS:
            return self._end_alias(ino, record)
        if record is None or record.state not in HELD:
            pool.rules.leases.drop(ino)
            return True
        if ino in pool.open.inodes and pool.open.inodes[ino].writers:
            return False  # a slab in use, or its last close will decide
        if record.state == State.UNRENAMED:
            return self._drop(ino, record)
        if record.state == State.LEASED and is_temporary(record.name):
            return self._hand_over(ino, record, State.ORPHAN)
        if (record.maker_tgid, record.maker_birth) == SERVER:
            return self._look_at(ino, record)
        return self._hand_over(ino, record, after(State(record.state), Event.MAKER_DIED))

    def _end_alias(self, ino: InodeNo, record: InodeRecord) -> bool:
        """Remove the second name of a block, because the process that linked it has ended."""
        try:
            end_alias(self._pool, ino, record)
        except (KvfsError, OSError) as error:
            _log.warning("the second name %r stays: %s", record.name, error)
            return False
        return True

    def _hand_over(self, ino: InodeNo, record: InodeRecord, state: State) -> bool:
        pool = self._pool
        settled = record._replace(state=state, maker_tgid=0, maker_birth=0)
        try:
            with pool.change(pool.counters) as change:
                change.write(Changed(ino, record, settled, Why.SETTLED))
        except (KvfsError, OSError) as error:
            _log.warning("inode %#x keeps its lease: %s", ino, error)
            return False
        return True

    def _look_at(self, ino: InodeNo, record: InodeRecord) -> bool:
        """Let the thread check whether *ino* is whole; the result is applied later."""
        if ino not in self._looking and len(self._looking) < _LOOKS_MAX:
            self._looking.add(ino)
            self._pool.background.submit_long(functools.partial(self._check, ino, record), ino)
        return False

    def _check(self, ino: InodeNo, record: InodeRecord) -> None:
        """Check, in the thread. A block that cannot be read is not known to be whole."""
        whole: bool | None = False
        try:
            fd = self._pool.extents.open(ino, os.O_RDONLY)
            try:
                whole = not lacks_bytes(self._pool.syscalls, fd, record.size_bytes)
            finally:
                self._pool.syscalls.close(fd)
        except OSError as error:
            _log.warning("inode %#x cannot be looked at: %s", ino, error)
            if error.errno in NO_DESCRIPTOR:
                whole = None  # the next tick tries again
        except Damaged as error:
            _log.error("inode %#x: %s", ino, error)
        self._pool.background.hand_over(functools.partial(self._looked, ino, record, whole))

    def _looked(self, ino: InodeNo, record: InodeRecord, whole: bool | None) -> None:
        """Apply the result, unless somebody used the block meanwhile."""
        self._looking.discard(ino)
        pool = self._pool
        if whole is None or pool.index.inode_or_miss(ino) != record:
            return
        if ino in pool.open.inodes and pool.open.inodes[ino].writers:
            return
        if whole:
            self._hand_over(ino, record, after(State(record.state), Event.MAKER_DIED))
        else:
            self.unproven += self._drop(ino, record)

    def _drop(self, ino: InodeNo, record: InodeRecord) -> bool:
        """Remove the name of *ino*: a miss, never half a block. False if that fails."""
        try:
            self._namespace.lose(ino)
        except (KvfsError, OSError) as error:
            _log.warning("inode %#x keeps its name: %s", ino, error)
            return False
        return True
