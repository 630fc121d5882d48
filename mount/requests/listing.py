"""One READDIR answer: rows of a directory from a cookie on, as many as the kernel's buffer takes.

Cookie 1 follows ".", cookie 2 follows "..", every other cookie is the inode number of the row
before it; so a listing misses and repeats nothing while names come and go.
"""

from typing import Final

import pyfuse3

from kvfs.core.errors import Damaged, DeadInode
from kvfs.core.lifecycle import UNFINISHED
from kvfs.core.types import FIRST_INODE, InodeNo
from kvfs.engine.store import Store
from kvfs.machine.processes import Maker
from mount.requests.entry_attributes import Entries

_AFTER_DOT: Final = 1
_AFTER_DOTDOT: Final = 2


def list_directory(
    store: Store,
    entries: Entries,
    ino: InodeNo,
    cookie: int,
    token: pyfuse3.ReaddirToken,
    who: Maker,
) -> None:
    """Put rows of directory *ino* behind *cookie* into *token*; a removed one has none.

    Drafts that process *who* must not see are left out.
    """
    record = store.namespace.record(ino)
    if cookie < _AFTER_DOT:
        dot = entries.entry(ino, record)
        if not pyfuse3.readdir_reply(token, b".", dot, _AFTER_DOT):
            return
    if cookie < _AFTER_DOTDOT:
        parent_record = store.pool.index.inode(record.parent) or record
        dotdot = entries.entry(record.parent, parent_record)
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
            settled = opened is None or not opened.writers
            if shown != child:
                child_record, settled = store.blocks.present(shown), True
            # A draft's name may be taken by another writer: the kernel asks again for it.
            row = entries.entry(shown, child_record, settled=settled, name_trusted=finished)
            if not pyfuse3.readdir_reply(token, name, row, child):
                return
