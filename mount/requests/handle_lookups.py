"""What file servers look up: a file by its handle, one row of a listing, names just listed.

An NFS server keeps handles: a node id and its generation (fs/fuse/inode.c, fuse_export_operations).
If the kernel has forgotten a node, it looks up ".". For a directory it also needs the path from the
root: it looks up "..", and lists the parent until it finds the inode number of the directory
(get_name in fs/exportfs/expfs.c). Programs never cause these lookups, because the kernel itself
resolves "." and ".." in a path. So a thread that looks up ".." and then opens the parent wants one
row of that directory, which is listed first.
"""

import time
from typing import Final, Generic, TypeVar

from kvfs.core.errors import DeadInode
from kvfs.core.lifecycle import HIDEABLE
from kvfs.core.rewriting import Kept, Recent
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.engine.store import Store
from mount.files.files import Files

NAMES: Final = (b".", b"..")
#: The OPENDIR follows at once; a later one is for another handle.
_WANTED: Final = Kept("which row of a directory a thread will look for", 1.0, 256)

#: A server looks the names up at once, but on a busy machine a page of them has taken seconds. One
#: that is too slow for this may fail, as without it.
_SHOWN: Final = Kept("which rows of a directory a file server's thread was shown", 5.0, 256)
#: Rows of one answer to a READDIR that are remembered: more than a page holds.
_ROWS_MAX: Final = 256

#: What the kernel was told of a name.
_Row = TypeVar("_Row")


class HandleLookups:
    """Finds nodes by number, and remembers which row a listing is for."""

    def __init__(self, store: Store, files: Files) -> None:
        self._store = store
        self._files = files
        #: By thread: a directory, and the row that the thread wants of it.
        self._wanted: Recent[int, tuple[InodeNo, InodeNo]] = Recent(_WANTED)
        #: By directory handle: the row to begin with; in ``_begun`` from the first READDIR on.
        self._ahead: dict[int, InodeNo] = {}
        self._begun: dict[int, InodeNo] = {}

    def lookup(self, node: InodeNo, name: bytes) -> tuple[InodeNo, InodeRecord]:
        """Return *node* for ".", its parent for ".."; *name* is one of ``NAMES``.

        Raises DeadInode, NotADirectory, Damaged.
        """
        ino = node if name == b"." else self._parent(node)
        self._require_name(ino)
        return ino, self._store.blocks.present(ino)

    def _parent(self, directory: InodeNo) -> InodeNo:
        """Return the parent of *directory*; the caller will list it for the name of *directory*."""
        parent = self._store.namespace.directory(directory).parent
        thread = self._files.thread()
        if thread > 0:  # 0: of another pid namespace; it reads the whole listing
            self._wanted.remember(thread, (parent, directory), time.monotonic())
        return parent

    def _require_name(self, ino: InodeNo) -> None:
        """Raise DeadInode unless *ino* has a name under which the caller sees it.

        A removed block keeps its bytes for a moment, or as long as it is open, but no handle leads
        to it again. A draft is found by those who see it under its name, and an old version by
        those who see it in place of a draft.
        """
        pool = self._store.pool
        opened = pool.open.inodes.get(ino)
        if opened is not None and opened.stands_in:
            return
        record = pool.index.inode(ino)
        if record is None:
            raise DeadInode(f"inode {ino} has no name")
        if record.state in HIDEABLE:
            seen = self._store.visibility.seen(ino, record, self._files.requester())
            if seen != ino:
                raise DeadInode(f"inode {ino} is hidden from the caller")

    def opened(self, fh: int, directory: InodeNo) -> None:
        """Note that *fh* lists *directory*, perhaps for the one row that its thread wants."""
        wanted = self._wanted.pop(self._files.thread(), time.monotonic())
        if wanted is not None and wanted[0] == directory:
            self._ahead[fh] = wanted[1]

    def first_row(self, fh: int, cookie: int) -> InodeNo | None:
        """Return the child that listing *fh* puts first, when it is read after *cookie*; or None.

        A listing that is not read from its beginning has its usual order.
        """
        child = self._ahead.pop(fh, None)
        if child is not None and cookie == 0:
            self._begun[fh] = child
        return self._begun.get(fh)

    def closed(self, fh: int) -> None:
        """Forget *fh*, which is closed."""
        self._ahead.pop(fh, None)
        self._begun.pop(fh, None)


class ListedNames(Generic[_Row]):
    """The rows that each thread of a file server was shown last, and will look up.

    NFS-Ganesha reads some rows of a directory and then looks up each of their names, on one thread
    (read_dirents in FSAL_VFS/handle.c of 4.3). If one of them is gone, it gives up the whole
    listing with that error, and so does its client. In a full pool a name may be evicted at any
    time. So for a moment a thread still finds each name that it was just shown, as it was then.
    """

    def __init__(self) -> None:
        self._shown: Recent[int, tuple[InodeNo, dict[bytes, _Row]]] = Recent(_SHOWN)
        #: Whether a file server has listed anything since the start.
        self.in_use = False

    def remember(self, thread: int, directory: InodeNo, rows: dict[bytes, _Row]) -> None:
        """Remember that *thread* was just shown *rows* of *directory*."""
        if rows and thread > 0:  # 0: any thread of another pid namespace
            self.in_use = True
            rows = dict(list(rows.items())[:_ROWS_MAX])
            self._shown.remember(thread, (directory, rows), time.monotonic())

    def find(self, thread: int, directory: InodeNo, name: bytes) -> _Row | None:
        """Return what *thread* was shown under *name* a moment ago; None if it was not."""
        shown = self._shown.of(thread, time.monotonic())
        if shown is None or shown[0] != directory:
            return None
        return shown[1].get(name)
