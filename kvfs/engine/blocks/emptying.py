"""A whole block that a file server empties becomes a draft, which only servers find.

A program's O_TRUNC gets a new inode (truncating_open.py). A server cannot: it has a handle, sets
the size to 0, and its client then writes by that handle. A process that has the block open sees
this, as on any file system. Nobody else sees less than the whole block.

The server may close its handle meanwhile, so the draft is kept open for it (served.py).
"""

from typing import Final

from kvfs.core.changed import Changed, Why
from kvfs.core.lifecycle import HIDEABLE, Event, State, after
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.engine.blocks.served import Served
from kvfs.machine.processes import SERVER
from kvfs.pool.allocator import Allocator
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.pool import Pool

#: Writers that are no client's handle: the one that empties the block, and the one kept open.
_OWN_WRITERS: Final = 2


class Emptying:
    """Turns blocks of one pool into drafts."""

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
        opened = self._pool.open_inodes.get(ino)
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
            sequence=pool.next_sequence(),
            maker_tgid=SERVER.tgid,
            maker_birth=SERVER.birth,
        )
        with pool.change(pool.counters._replace(sequence=draft.sequence), begun=ino) as change:
            change.write(Changed(ino, record, draft, Why.REOPENED))
        opened.empty()
        opened.maker = SERVER
        pool.open_notes.writing(opened)
        # New bytes go to new disk blocks, which the device gets after the identity's removal.
        opened.identity_lingers = False
        self._served.keep_open(opened)
        pool.kernel.name_vanished(record.parent, record.name)

    def choose_course(self, opened: OpenInode) -> None:
        """Choose whether writers of *opened*, which is empty now, must ask for space."""
        pool, record = self._pool, self._pool.index.inode_or_miss(opened.ino)
        has_handles = opened.readers or opened.writers > _OWN_WRITERS
        if record is not None and not has_handles:
            self._allocator.choose_course(opened, record.parent)
        elif pool.kernel.writers_run_free and not opened.through_daemon:
            pool.open_inodes.let_run(opened)  # an open inode stays on its data path
