"""Answers in the objects of pyfuse3: the attributes of an inode, and the rows of a READDIR."""

from typing import Final

import pyfuse3

from kvfs.core.errors import Damaged, DeadInode
from kvfs.core.lifecycle import UNFINISHED
from kvfs.core.types import FIRST_INODE, PAGE_BYTES, STAT_BLOCK_BYTES, InodeNo
from kvfs.engine.store import Store
from kvfs.machine.processes import Maker
from mount.requests.answers import Answers, Entry, Validity

_AFTER_DOT: Final = 1
_AFTER_DOTDOT: Final = 2


def entry_attributes(found: Entry | Validity) -> pyfuse3.EntryAttributes:
    """Return what was *found*; "no such name" has only a timeout."""
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


def list_directory(
    store: Store,
    answers: Answers,
    ino: InodeNo,
    cookie: int,
    token: pyfuse3.ReaddirToken,
    who: Maker,
) -> None:
    """Put rows of directory *ino* behind *cookie* into *token*, as many as it takes.

    A removed directory has none. Drafts that process *who* must not see are left out.

    Cookie 1 follows ".", cookie 2 follows "..", every other cookie is the inode number of the row
    before it; so a listing misses and repeats nothing while names come and go.
    """
    record = store.namespace.record(ino)
    if cookie < _AFTER_DOT:
        dot = entry_attributes(answers.entry(ino, record))
        if not pyfuse3.readdir_reply(token, b".", dot, _AFTER_DOT):
            return
    if cookie < _AFTER_DOTDOT:
        parent_record = store.pool.index.inode(record.parent) or record
        dotdot = entry_attributes(answers.entry(record.parent, parent_record))
        if not pyfuse3.readdir_reply(token, b"..", dotdot, _AFTER_DOTDOT):
            return
    after = InodeNo(cookie if cookie >= FIRST_INODE else 0)
    open_inodes = store.pool.open_inodes
    while children := store.namespace.children(ino, after):
        for child, name in children:
            after = child
            opened = open_inodes.get(child)
            if opened is None:
                try:
                    child_record = store.namespace.record(child)
                except (DeadInode, Damaged):
                    continue
            else:
                child_record = store.blocks.present(child)
            finished = child_record.state not in UNFINISHED
            shown = store.visibility.seen(child, child_record, who)
            if shown is None:
                continue
            if shown != child:
                child_record = store.blocks.present(shown)
            # A draft's name may be taken by another writer: the kernel asks again for it.
            row = answers.entry(shown, child_record, name_trusted=finished)
            if not pyfuse3.readdir_reply(token, name, entry_attributes(row), child):
                return
