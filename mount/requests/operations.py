"""The request handlers that pyfuse3 calls: a short one for each kind, and no storage logic.

Handlers that never wait are plain functions (``answered``), so pyfuse3 runs each to its end before
the next request is read.
"""

import errno
import os
import stat
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import pyfuse3
from pyfuse3 import EntryAttributes, FileInfo, RequestContext, SetattrFields

from kvfs.core.errors import DeadInode, NotPermitted
from kvfs.core.types import InodeNo
from kvfs.engine.attributes import NewAttributes
from kvfs.engine.store import Store
from kvfs.machine.processes import SERVER
from mount.files.files import NOT_A_READER, Files
from mount.fuse.errno_map import answered, awaited
from mount.fuse.libfuse_pair import NAME_OF_TMPFILE
from mount.fuse.wire import FOPEN_DIRECT_IO, FOPEN_KEEP_CACHE, Grant
from mount.requests.answers import Answers
from mount.requests.changes import Changes
from mount.requests.replies import Listing, entry_attributes

_NODE_KINDS: Final = (stat.S_IFIFO, stat.S_IFSOCK)

#: Tells the channel what to add to the reply to a request, which has this number.
Granted = Callable[[int, Grant], None]


def _storable(time_ns: int) -> int:
    """Return the nearest time that 64 bits of nanoseconds hold: 1677 to 2262, as XFS clamps."""
    return max(-(1 << 63), min(time_ns, (1 << 63) - 1))


class Operations(pyfuse3.Operations):
    """The request handlers of one mount."""

    supports_dot_lookup = True
    enable_writeback_cache = False

    def __init__(
        self,
        store: Store,
        files: Files,
        answers: Answers,
        granted: Granted,
    ) -> None:
        super().__init__()
        self._store = store
        self._namespace = store.namespace
        self._files = files
        self.asks = files.asks
        self._answers = answers
        self._changes = Changes(files)
        self._by_handle = answers.by_handle
        self._granted = granted

    def _request(self) -> int:
        return self._files.request.present.unique

    def _file_info(self, fh: int, grant: Grant) -> FileInfo:
        self._granted(self._request(), grant)
        return FileInfo(
            fh=fh,
            direct_io=bool(grant.open_flags & FOPEN_DIRECT_IO),
            keep_cache=bool(grant.open_flags & FOPEN_KEEP_CACHE),
        )

    # ---- names ----

    @answered
    def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        """Look a name up. The kernel caches the answer for a while, also a miss."""
        return entry_attributes(self._answers.lookup(InodeNo(parent_inode), name))

    @answered
    def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: RequestContext
    ) -> EntryAttributes:
        """Make a directory."""
        ino, record = self._namespace.make_node(
            InodeNo(parent_inode),
            name,
            mode,
            ctx.uid,
            ctx.gid,
            request=self._request(),
            asks=self._files.callers.uid(),
        )
        return entry_attributes(self._answers.entry(ino, record))

    @answered
    def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        """Make an empty file, a fifo or a socket. Device nodes are refused."""
        parent = InodeNo(parent_inode)
        if stat.S_ISREG(mode):
            maker = self._files.requester()
            ino, record = self._store.blocks.make_file(
                parent, name, mode, ctx.uid, ctx.gid, maker, request=self._request()
            )
        elif stat.S_IFMT(mode) in _NODE_KINDS:
            ino, record = self._namespace.make_node(
                parent,
                name,
                mode,
                ctx.uid,
                ctx.gid,
                request=self._request(),
                asks=self._files.callers.uid(),
            )
        else:
            raise NotPermitted("device nodes")
        trusted = self._store.visibility.trusts_name(record, just_created=True)
        return entry_attributes(self._answers.entry(ino, record, name_trusted=trusted))

    @answered
    def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        """Make a symlink."""
        mode = stat.S_IFLNK | 0o777
        ino, record = self._namespace.make_node(
            InodeNo(parent_inode),
            name,
            mode,
            ctx.uid,
            ctx.gid,
            target,
            request=self._request(),
            asks=self._files.callers.uid(),
        )
        return entry_attributes(self._answers.entry(ino, record))

    @answered
    def readlink(self, inode: int, ctx: RequestContext) -> bytes:
        """Return a symlink's target."""
        return self._namespace.record(InodeNo(inode)).target

    @answered
    def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        """Publish a block under another name. It is refused for all else (EPERM, EMLINK)."""
        parent = InodeNo(new_parent_inode)
        found = self._answers.link(InodeNo(inode), parent, new_name, ctx.uid)
        return entry_attributes(found)

    @answered
    def unlink(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        """Remove a file's name."""
        self._answers.unlink(InodeNo(parent_inode), name)

    @answered
    def rmdir(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        """Remove an empty directory."""
        self._namespace.rmdir(InodeNo(parent_inode), name, request=self._request())

    @answered
    def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: RequestContext,
    ) -> None:
        """Move a name, also with RENAME_NOREPLACE or RENAME_EXCHANGE."""
        old, new = InodeNo(parent_inode_old), InodeNo(parent_inode_new)
        self._answers.rename(old, name_old, new, name_new, flags)

    # ---- attributes ----

    @answered
    def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        """Return attributes, also of a removed inode that is open."""
        return entry_attributes(self._answers.attributes(InodeNo(inode)))

    @awaited
    async def setattr(
        self,
        inode: int,
        attr: EntryAttributes,
        fields: SetattrFields,
        fh: int | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        """Change what *fields* names."""
        change = NewAttributes(
            mode=attr.st_mode if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            size_bytes=attr.st_size if fields.update_size else None,
            atime_ns=_storable(attr.st_atime_ns) if fields.update_atime else None,
            mtime_ns=_storable(attr.st_mtime_ns) if fields.update_mtime else None,
        )
        await self._changes.change(InodeNo(inode), change, fh)
        return entry_attributes(self._answers.attributes(InodeNo(inode)))

    @answered
    def getxattr(self, inode: int, name: bytes, ctx: RequestContext) -> bytes:
        """Return one attribute's value."""
        return self._store.attributes.xattr(InodeNo(inode), name)

    @answered
    def listxattr(self, inode: int, ctx: RequestContext) -> Sequence[bytes]:
        """Return the names of the attributes."""
        return self._store.attributes.xattr_names(InodeNo(inode))

    @answered
    def setxattr(self, inode: int, name: bytes, value: bytes, ctx: RequestContext) -> None:
        """Set one user.* attribute."""
        self._store.attributes.set_xattr(
            InodeNo(inode), name, value, self._files.callers.uid(), request=self._request()
        )

    @answered
    def removexattr(self, inode: int, name: bytes, ctx: RequestContext) -> None:
        """Remove one user.* attribute."""
        self._store.attributes.remove_xattr(
            InodeNo(inode), name, self._files.callers.uid(), request=self._request()
        )

    # ---- files ----

    @awaited
    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        """Open a file. O_TRUNC needs a little space; a rewrite must first remove the identity."""
        if flags & os.O_TRUNC:
            await self._files.find_room_to_begin(self._files.held.directory_of(InodeNo(inode)))
        elif self._store.verifier.is_due(InodeNo(inode)):
            await self._verify(InodeNo(inode), stores=bool(flags & NOT_A_READER))
        fh, grant = self._files.open(InodeNo(inode), flags)
        await self._files.settle_rewrite(fh)
        return self._file_info(fh, grant)

    async def _verify(self, ino: InodeNo, *, stores: bool) -> None:
        """Compare *ino* with its checksum.

        Raises DeadInode if its bytes are wrong; DeviceSilent, at once for an open that *stores*.
        """
        verifier = self._store.verifier
        look = verifier.begin(ino)
        if look is None:
            return
        read = partial(verifier.read, look)
        verdict = await self._files.asks.compare(read, ino=ino, stores=stores)
        if not verifier.judge(look, verdict):
            raise DeadInode(f"inode {ino} has other bytes than were stored")

    @awaited
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        """Create and open a file; a full pool evicts something first. TMPFILE comes here, too."""
        parent = InodeNo(parent_inode)
        if name == NAME_OF_TMPFILE:
            fh, grant, entry = await self._answers.create_nameless(parent, mode, flags)
        else:
            fh, grant, entry = await self._answers.create(parent, name, mode, flags)
        return self._file_info(fh, grant), entry_attributes(entry)

    @answered
    def flush(self, fh: int) -> None:
        """Check whether the closing process is dying. Its file may still be open."""
        self._files.flush(fh, self._files.thread())

    @answered
    def release(self, fh: int) -> None:
        """Close a handle."""
        self._files.release(fh)

    @awaited
    async def fsync(self, fh: int, datasync: bool) -> None:
        """Sync with ``fsync=honour``. Otherwise answer ENOSYS once, and the kernel stops asking."""
        if self._store.pool.settings.fsync != "honour":
            raise pyfuse3.FUSEError(errno.ENOSYS)
        await self._files.sync(fh)

    # ---- directories ----

    @answered
    def opendir(self, inode: int, ctx: RequestContext) -> int:
        """Open a directory."""
        return self._answers.open_directory(InodeNo(inode))

    @answered
    def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        """List a directory after cookie *start_id*."""
        ino = self._files.handles.get(fh).opened.ino
        who = self._files.requester()
        listing = Listing(self._store, self._answers, ino, who)
        listing.put(token, start_id, self._by_handle.first_row(fh, start_id))
        if who == SERVER:
            self._answers.listed.remember(self._files.thread(), ino, listing.rows)

    @answered
    def releasedir(self, fh: int) -> None:
        """Close a directory."""
        self._answers.close_directory(fh)

    @awaited
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        """Sync the index with ``fsync=honour``."""
        if self._store.pool.settings.fsync != "honour":
            raise pyfuse3.FUSEError(errno.ENOSYS)
        await self._files.sync_names()
