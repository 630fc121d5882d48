"""Answers in the objects of pyfuse3: the attributes of an inode, and the rows of a READDIR."""

from typing import Final

import pyfuse3

from kvfs.core.errors import Damaged, DeadInode
from kvfs.core.inode_rules import block_of
from kvfs.core.lifecycle import HIDEABLE, State
from kvfs.core.types import FIRST_INODE, PAGE_BYTES, STAT_BLOCK_BYTES, InodeNo
from kvfs.engine.store import Store
from kvfs.machine.processes import Maker
from mount.requests.answers import Answers, Entry, Validity

_AFTER_DOT: Final = 1
_AFTER_DOTDOT: Final = 2
_AFTER_FIRST: Final = 3


def entry_attributes(found: Entry | Validity) -> pyfuse3.EntryAttributes:
    """Return what was *found* as pyfuse3 takes it; "no such name" has only a timeout."""
    reply = pyfuse3.EntryAttributes()
    if isinstance(found, Validity):
        reply.st_ino = 0
        reply.entry_timeout = found.valid_s
        return reply
    ino, record, links, attributes_kept, generation, name_kept = found
    reply.st_ino = ino
    reply.generation = generation
    reply.st_mode = record.mode
    reply.st_nlink = links
    reply.st_uid = record.uid
    reply.st_gid = record.gid
    reply.st_size = record.size_bytes
    reply.st_blksize = PAGE_BYTES
    reply.st_blocks = record.allocated_bytes // STAT_BLOCK_BYTES
    reply.st_atime_ns = record.atime_ns
    reply.st_mtime_ns = record.mtime_ns
    reply.st_ctime_ns = record.ctime_ns
    reply.entry_timeout = name_kept.valid_s
    reply.attr_timeout = attributes_kept.valid_s
    return reply


class Listing:
    """The rows of directory *ino* as process *who* sees it; a removed directory has none.

    Cookie 1 comes after ".", cookie 2 after "..". Every other cookie is the inode number of the row
    before it, so that a listing misses and repeats nothing while names come and go. Cookie 3 comes
    after a row that was put first; the others follow in order, without that row.
    """

    def __init__(self, store: Store, answers: Answers, ino: InodeNo, who: Maker) -> None:
        """Raises DeadInode."""
        self._store = store
        self._answers = answers
        self._ino = ino
        self._who = who
        self._record = store.namespace.record(ino)
        #: The rows that were put, except "." and "..".
        self.rows: dict[bytes, Entry] = {}

    def put(self, token: pyfuse3.ReaddirToken, cookie: int, first: InodeNo | None) -> None:
        """Put the rows after *cookie* into *token*, as many as it takes.

        A listing that begins with the child *first* gets only that row at first, without a look at
        the others. Drafts that ``who`` must not see are left out.
        """
        if cookie == 0 and first is not None and self._put_first(token, first):
            return
        if cookie == _AFTER_FIRST:
            cookie = 0
        if cookie < _AFTER_DOT:
            dot = entry_attributes(self._answers.entry(self._ino, self._record))
            if not pyfuse3.readdir_reply(token, b".", dot, _AFTER_DOT):
                return
        if cookie < _AFTER_DOTDOT:
            above = self._record.parent
            parent_record = self._store.pool.index.inode(above) or self._record
            dotdot = entry_attributes(self._answers.entry(above, parent_record))
            if not pyfuse3.readdir_reply(token, b"..", dotdot, _AFTER_DOTDOT):
                return
        after = InodeNo(cookie if cookie >= FIRST_INODE else 0)
        while children := self._store.namespace.children(self._ino, after):
            for child, name in children:
                after = child
                entry = None if child == first else self._entry(child)
                if entry is None:
                    continue
                if not pyfuse3.readdir_reply(token, name, entry_attributes(entry), child):
                    return
                self.rows[name] = entry

    def _put_first(self, token: pyfuse3.ReaddirToken, child: InodeNo) -> bool:
        """Put the row of *child*; False if it is not in the directory any more."""
        record = self._store.pool.index.inode_or_miss(child)
        if record is None or record.parent != self._ino:
            return False
        entry = self._entry(child)
        return entry is not None and pyfuse3.readdir_reply(
            token, record.name, entry_attributes(entry), _AFTER_FIRST
        )

    def _entry(self, child: InodeNo) -> Entry | None:
        """Return what the name of *child* shows; None if it shows nothing."""
        store = self._store
        if store.pool.open.inodes.get(child) is None:
            try:
                record = store.namespace.record(child)
                if record.state == State.ALIAS:
                    child = block_of(record)
                    record = store.blocks.present(child)
            except (DeadInode, Damaged):
                return None
        else:
            record = store.blocks.present(child)
        finished = record.state not in HIDEABLE
        shown = store.visibility.seen(child, record, self._who)
        if shown is None:
            return None
        if shown != child:
            record = store.blocks.present(shown)
        # Another writer may take the name of a draft, so the kernel must ask for it again.
        return self._answers.entry(shown, record, name_trusted=finished)
