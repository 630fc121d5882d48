"""What the kernel asks to find a file by its handle: LOOKUP of "." and "..", and one listing.

An NFS server holds handles: a node id and its generation (fs/fuse/inode.c, fuse_export_operations).
A node that the kernel has forgotten it looks up as ".". Of a directory it wants the way from the
root, too: it looks ".." up and lists what that leads to, until the inode number of the directory
comes by (get_name in fs/exportfs/expfs.c). Programs cause none of these lookups: the kernel walks
"." and ".." in a path by itself. So the thread that looks ".." up and then opens that directory
wants one row of it, which is listed first.
"""

import time
from typing import Final

from kvfs.core.errors import DeadInode
from kvfs.core.lifecycle import HIDEABLE
from kvfs.core.rewriting import Kept
from kvfs.core.second_tries import Recent
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.engine.store import Store
from mount.files.files import Files

NAMES: Final = (b".", b"..")
#: The OPENDIR follows at once; after this it is for another handle.
_WANTED: Final = Kept("which row of a directory a thread will look for", 1.0, 256)


class HandleLookups:
    """Finds nodes by number, and remembers which row a listing is for."""

    def __init__(self, store: Store, files: Files) -> None:
        self._store = store
        self._files = files
        #: By thread: a directory, and the row that is wanted of it.
        self._wanted: Recent[int, tuple[InodeNo, InodeNo]] = Recent(_WANTED)
        #: By handle of a directory: the row to begin with, before and from the first READDIR.
        self._ahead: dict[int, InodeNo] = {}
        self._begun: dict[int, InodeNo] = {}

    def lookup(self, node: InodeNo, name: bytes) -> tuple[InodeNo, InodeRecord]:
        """Return *node* for ".", its parent for "..", which is one of ``NAMES``.

        Raises DeadInode, NotADirectory, Damaged.
        """
        ino = node if name == b"." else self._parent(node)
        self._require_name(ino)
        return ino, self._store.blocks.present(ino)

    def _parent(self, directory: InodeNo) -> InodeNo:
        """Return the parent of *directory*; who asks lists it next, for the name of *directory*."""
        parent = self._store.namespace.directory(directory).parent
        thread = self._files.thread()
        if thread > 0:  # of another pid namespace it is 0: it reads the whole listing
            self._wanted.note(thread, (parent, directory), time.monotonic())
        return parent

    def _require_name(self, ino: InodeNo) -> None:
        """Raise DeadInode if *ino* has no name that shows it to who asks.

        A removed block has its bytes for a moment yet, or as long as it is open, but by a handle
        nobody comes to it again. A draft shows as by its name, an old version for its draft.
        """
        pool = self._store.pool
        opened = pool.open_inodes.get(ino)
        if opened is not None and opened.stands_in:
            return
        record = pool.index.inode(ino)
        if record is None:
            raise DeadInode(f"inode {ino} has no name")
        if record.state in HIDEABLE:
            seen = self._store.visibility.seen(ino, record, self._files.requester())
            if seen != ino:
                raise DeadInode(f"inode {ino} is not shown to who asks")

    def opened(self, fh: int, directory: InodeNo) -> None:
        """*fh* is a listing of *directory*, perhaps for the one row that its thread wants."""
        wanted = self._wanted.take(self._files.thread(), time.monotonic())
        if wanted is not None and wanted[0] == directory:
            self._ahead[fh] = wanted[1]

    def first_row(self, fh: int, cookie: int) -> InodeNo | None:
        """Return the child that listing *fh* begins with, now read after *cookie*; None: no order.

        One that is not read from its beginning has its rows where they are.
        """
        child = self._ahead.pop(fh, None)
        if child is not None and cookie == 0:
            self._begun[fh] = child
        return self._begun.get(fh)

    def closed(self, fh: int) -> None:
        """*fh* is closed."""
        self._ahead.pop(fh, None)
        self._begun.pop(fh, None)
