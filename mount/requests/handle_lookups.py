"""What the kernel asks to find a file by its handle: LOOKUP of "." and "..", and one listing.

An NFS server keeps handles: a node id and its generation (fs/fuse/inode.c, fuse_export_operations).
If the kernel has forgotten a node, it looks up ".". For a directory it also needs the path from the
root: it looks up "..", and lists the parent until it finds the inode number of the directory
(get_name in fs/exportfs/expfs.c). Programs never cause these lookups, because the kernel itself
resolves "." and ".." in a path. So a thread that looks up ".." and then opens the parent wants one
row of that directory, which is listed first.
"""

import time
from hashlib import blake2b
from typing import Final

from kvfs.core.errors import DeadInode
from kvfs.core.lifecycle import HIDEABLE
from kvfs.core.rewriting import Kept, Recent
from kvfs.core.types import ROOT_INODE, InodeNo, InodeRecord
from kvfs.engine.store import Store
from mount.files.files import Files

_U32_MAX: Final = 0xFFFFFFFF
NAMES: Final = (b".", b"..")
#: The OPENDIR follows at once; a later one is for another handle.
_WANTED: Final = Kept("which row of a directory a thread will look for", 1.0, 256)


class Generations:
    """The generation of each inode, which a handle must name beside the inode's number.

    Inode numbers can be guessed by counting. With one generation for all, a client that may search
    one directory of an export could make up handles of files in others (no_subtree_check).
    """

    def __init__(self, epoch: int, *, alike: bool = False) -> None:
        """*epoch* is the pool's secret of 64 bits; *alike*: it gives all inodes the same one."""
        self._alike = epoch & _U32_MAX if alike else None
        self._key = epoch.to_bytes(8, "little")

    def of(self, ino: InodeNo) -> int:
        """Return the generation of *ino*, of 32 bits.

        It is 0 for the root: the kernel warns of any other one (fuse_lookup_name() in
        fs/fuse/dir.c).
        """
        if ino == ROOT_INODE:
            return 0
        if self._alike is not None:
            return self._alike
        code = blake2b(ino.to_bytes(8, "little"), key=self._key, digest_size=4)
        return int.from_bytes(code.digest(), "little")


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
                raise DeadInode(f"inode {ino} is not shown to who asks")

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
