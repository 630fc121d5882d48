"""Files as handles: open, create, read, write, release, on whichever data path there is.

Handlers know this class, and this class knows no message. The data path decides how the kernel
may reach the bytes; an inode stays on one path from its first handle to its last.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

import trio

from kvfs import holes
from kvfs.errors import AccessDenied, BadHandle, Damaged, DeadInode, Exists, NoSpace
from kvfs.makers import NOBODY, Maker
from kvfs.open_inodes import OpenInode
from kvfs.store import Store
from kvfs.types import HandleNo, InodeNo, InodeRecord
from mount.grant import Grant
from mount.handles import Handle, HandleKind, Handles
from mount.permissions import surely_may_open
from mount.readers import Readers
from mount.room import DEVICE_TRIES, NO_SPACE, Room

R = TypeVar("R")
_WRITABLE: Final = (os.O_WRONLY, os.O_RDWR)
#: Opens that write or truncate change the block's life.
NOT_A_READER: Final = os.O_ACCMODE | os.O_TRUNC


class DataPath(Protocol):
    """How the kernel reaches the bytes of an open file."""

    name: str

    def grant(self, opened: OpenInode, *, writer: bool) -> Grant:
        """Decide for a new handle on *opened*."""

    def freed(self, opened: OpenInode) -> None:
        """Learn that the inode's last handle is gone."""

    def describe(self) -> dict[str, int]:
        """Return figures for `kvfs status`."""


def _do_nothing() -> None:
    """Stand in while no channel is there."""


def is_writer(flags: int) -> bool:
    """Whether a handle with open(2) *flags* may write."""
    return flags & os.O_ACCMODE in _WRITABLE


class Files:
    """All open files and directories of one mount."""

    def __init__(self, store: Store, handles: Handles, path: DataPath, io_threads: int) -> None:
        self.store = store
        self.handles = handles
        self.readers = Readers(store.pool, handles, store.pool.settings.backing_ids_max)
        self.path = path
        #: Tells which process made the request being handled.
        self.requester: Callable[[], Maker] = lambda: NOBODY
        #: And which thread.
        self.thread: Callable[[], int] = lambda: 0
        self._limiter = trio.CapacityLimiter(io_threads)
        self.room = Room(store)
        #: Whether the backing file system knows writes that do not wait: ext4 and tmpfs do not.
        self._writes_at_once = True
        #: Called before a handler waits, so that the next request is read meanwhile. What it
        #: returns is called before the handler goes on: many may end waiting at once, each with a
        #: megabyte, and an answer without room is lost.
        self.about_to_wait: Callable[[], Callable[[], None]] = lambda: _do_nothing

    def open(self, ino: InodeNo, flags: int) -> tuple[HandleNo, Grant]:
        """Open file *ino*. Raises what ``Blocks.open`` raises."""
        if not flags & NOT_A_READER:
            return self._open_to_read(ino, flags)
        writer = is_writer(flags)
        opened = self.store.blocks.open(
            ino,
            writer=writer,
            truncate=bool(flags & os.O_TRUNC),
            appends=bool(flags & os.O_APPEND),
            maker=self.requester() if writer else NOBODY,
            thread=self.thread(),
        )
        return self._granted(opened, flags, writer=writer)

    def _open_to_read(self, ino: InodeNo, flags: int) -> tuple[HandleNo, Grant]:
        shared = self.readers.enter(ino, flags)
        if shared is not None:
            return shared.handle.fh, shared.grant
        opened = self.store.blocks.open_to_read(ino)
        fh, grant = self._granted(opened, flags, writer=False)
        self.readers.share(self.handles.get(fh), grant)
        return fh, grant

    async def settle_rewrite(self, fh: HandleNo) -> None:
        """Wait, before a writer may overwrite a whole block, until the device forgot that it is.

        One fsync the first time a published block is opened for rewriting. Raises OSError: the
        handle is closed then.
        """
        opened = self.handles.get(fh).opened
        if not self.store.blocks.publishing.must_forget(opened):
            return
        try:
            await self._in_thread(self.store.blocks.publishing.forget_durably, opened)
        except OSError:
            self.release(fh)
            raise

    def create(
        self, parent: InodeNo, name: bytes, mode: int, flags: int, uid: int, gid: int
    ) -> tuple[HandleNo, Grant, InodeNo, InodeRecord]:
        """Create and open a file. Raises what ``Blocks.create`` and ``Blocks.open`` raise."""
        blocks = self.store.blocks
        opened, record = blocks.create(parent, name, mode, uid, gid, self.requester())
        if blocks.superseding.retrying:
            blocks.superseding.forget(self.thread())
        if not is_writer(flags):
            # A reader's handle on a file that nobody writes: it is published, empty, at once.
            blocks.enter_reader(opened)
            try:
                fh, grant = self._granted(opened, flags, writer=False)
            except BaseException:
                blocks.spoil(opened)
                raise
            finally:
                blocks.close(opened, writer=True)
            return fh, grant, opened.ino, blocks.present(opened.ino)
        fh, grant = self._granted(opened, flags, writer=True)
        return fh, grant, opened.ino, record

    async def open_or_create(
        self, parent: InodeNo, name: bytes, mode: int, flags: int, uid: int, gid: int
    ) -> tuple[HandleNo, Grant, InodeNo, InodeRecord]:
        """Create and open a file; without O_EXCL an existing one is opened, as open(2) has it.

        The kernel asks for that when it had not seen the name. Raises what ``create``,
        ``_require_open``, ``Blocks.open`` and ``settle_rewrite`` raise.
        """
        try:
            return self.create(parent, name, mode, flags, uid, gid)
        except Exists:
            if flags & os.O_EXCL:
                raise
        ino = self.store.namespace.lookup(parent, name)
        self._require_open(ino, flags, uid, gid)
        fh, grant = self.open(ino, flags)
        await self.settle_rewrite(fh)
        return fh, grant, ino, self.store.blocks.present(ino)

    def _require_open(self, ino: InodeNo, flags: int, uid: int, gid: int) -> None:
        """Refuse what a CREATE must not open: behind one the kernel checks no permissions.

        Raises AccessDenied for what the requester does not see, and DeadInode: the kernel then
        looks the name up again by itself, checks, and sends an OPEN.
        """
        store, truncates = self.store, bool(flags & os.O_TRUNC)
        record = store.namespace.record(ino)
        sticky = store.namespace.directory(record.parent).mode & stat.S_ISVTX
        may = surely_may_open(record, flags, uid, gid, sticky=bool(sticky))
        seen = store.visibility.seen(ino, record, self.requester())
        if seen is None and not (may and truncates):
            raise AccessDenied(f"inode {ino} is not shown to who asks")
        if not may or (seen != ino and not truncates):
            store.blocks.superseding.refuse_create(self.thread(), truncates=truncates)
            raise DeadInode(f"inode {ino} is opened by its number")

    def trusts_created(self, record: InodeRecord) -> bool:
        """Whether the kernel may keep the name that a CREATE just made.

        Not when somebody lost it before: his rename would carry the kernel's belief along.
        """
        if self.store.blocks.superseding.contended(record.parent, record.name):
            return False
        return self.store.visibility.trusts_name(record, just_created=True)

    def _granted(self, opened: OpenInode, flags: int, *, writer: bool) -> tuple[HandleNo, Grant]:
        """Record the handle before the reply that tells the kernel of it."""
        kind = HandleKind.READER
        if writer:
            kind, opened.flushed = HandleKind.WRITER, False
        try:
            grant = self.path.grant(opened, writer=writer)
            return self.handles.open(kind, flags, opened, grant.backing_id).fh, grant
        except BaseException as error:
            if isinstance(error, Damaged):
                self.store.blocks.publishing.dismiss(opened, error)
            self.store.blocks.abandon(opened, writer=writer)
            raise

    def release(self, fh: int) -> None:
        """Close handle *fh*: the last writer publishes. Raises BadHandle, NoSpace."""
        handle = self.handles.get(fh)
        if not self.readers.close(handle):
            self.store.blocks.close(handle.opened, writer=handle.kind is HandleKind.WRITER)

    def flush(self, fh: int, tid: int) -> None:
        """Thread *tid* closes a descriptor of *fh*; says nothing about being done.

        Raises NoSpace for a draft that was stopped, which is how its writer hears of it.
        """
        handle = self.handles.get(fh)
        if handle.kind is HandleKind.WRITER:
            self.store.blocks.publishing.look_at_closer(handle.opened, tid)
            self.store.watch.look_at_closing(handle.opened)
            handle.opened.flushed = True
            if handle.opened.overrun:
                raise NoSpace("its bytes were given back")

    async def read(self, fh: int, offset_bytes: int, size_bytes: int) -> bytes:
        """Return up to *size_bytes* from *offset_bytes*, short only at the end of the file."""
        fd = self.extent_fd(fh)
        return await self._in_thread(self.store.pool.syscalls.pread, fd, size_bytes, offset_bytes)

    async def write(self, fh: int, offset_bytes: int, data: bytes) -> int:
        """Write *data* and return how much of it was taken. Raises NoSpace, TooLarge, OSError."""
        handle = self.handles.get(fh)
        if handle.kind is not HandleKind.WRITER:
            raise BadHandle("not open for writing")
        blocks = self.store.blocks
        opened = handle.opened
        fd = self._extent_fd(handle)
        growth_bytes = blocks.growth_bytes(opened, offset_bytes + len(data), len(data))
        if growth_bytes:
            try:
                await self.find_room(growth_bytes)
                if await self._reserve_late(opened, fd, growth_bytes):
                    growth_bytes = blocks.growth_bytes(opened, offset_bytes + len(data), len(data))
                    if growth_bytes:
                        await self.find_room(growth_bytes)
            except NoSpace:
                blocks.spoil(opened)
                raise
        return await self._write_all(opened, fd, offset_bytes, memoryview(data), growth_bytes)

    def write_at_once(self, fh: int, offset_bytes: int, data: memoryview) -> bool:
        """Write all of *data* if there is room and no need to wait; else False.

        ``write`` does it then, from the start. Raises BadHandle, Damaged, TooLarge, OSError.
        """
        handle = self.handles.get(fh)
        if handle.kind is not HandleKind.WRITER or not self._writes_at_once:
            return False
        opened, pool = handle.opened, self.store.pool
        growth_bytes = self.store.blocks.growth_bytes(opened, offset_bytes + len(data), len(data))
        fd = self._extent_fd(handle)
        try:
            if growth_bytes:
                if pool.late_reserve_bytes(opened, growth_bytes):
                    return False  # more than a short job
                # No await from here to the account of what was allocated.
                pool.require_space(growth_bytes)
                pool.extents.reserve_write(fd, offset_bytes, len(data))
            # A new mtime is a transaction, for which such a write does not wait; nor would it be
            # one that lasts: an unlink is longer.
            pool.syscalls.utime(fd)
            written_bytes = pool.syscalls.pwritev(fd, [data], offset_bytes, os.RWF_NOWAIT)
        except NoSpace:
            return False  # it is worth waiting for, or not
        except OSError as error:
            self._writes_at_once = error.errno != errno.EOPNOTSUPP
            return False  # it would wait; or the device fails, which the thread finds out
        finally:
            # Also holes were filled, if the file has some.
            pool.note_allocated(opened, pool.extents.allocated_bytes(fd))
        return written_bytes == len(data)

    async def _reserve_late(self, opened: OpenInode, fd: int, growth_bytes: int) -> bool:
        """Give a draft the room for all of it, if that is there now; False if nothing was done."""
        pool = self.store.pool
        end_bytes = pool.late_reserve_bytes(opened, growth_bytes)
        if not end_bytes:
            return False
        lacking_bytes = end_bytes - opened.allocated_bytes
        pool.space.pledged_bytes += lacking_bytes
        try:
            with contextlib.suppress(NoSpace):
                await self._in_thread(pool.extents.reserve, fd, end_bytes)
                holes.reserved(opened, end_bytes)
        finally:
            pool.space.pledged_bytes -= lacking_bytes
        if opened.ino in pool.open_inodes:
            pool.note_allocated(opened, pool.extents.allocated_bytes(fd))
        return True

    async def _write_all(
        self, opened: OpenInode, fd: int, offset_bytes: int, data: memoryview, growth_bytes: int
    ) -> int:
        """Write *data*, for which *growth_bytes* of room were found just now."""
        pool = self.store.pool
        done_bytes = 0
        for attempt in range(DEVICE_TRIES):
            # Atomic: no checkpoint since the room was found.
            pool.space.pledged_bytes += growth_bytes
            try:
                written_bytes, allocated_bytes, error = await self._in_thread(
                    self._write, fd, offset_bytes + done_bytes, data[done_bytes:], growth_bytes
                )
            finally:
                pool.space.pledged_bytes -= growth_bytes
            done_bytes += written_bytes
            if opened.ino in pool.open_inodes:
                pool.note_allocated(opened, allocated_bytes)
            if error is None:
                return done_bytes
            full = error.errno in NO_SPACE
            if not full and done_bytes:
                return done_bytes
            try:
                if not full or attempt == DEVICE_TRIES - 1:
                    raise error
                # Somebody else fills the file system that the pool lies on.
                growth_bytes = len(data) - done_bytes
                pool.device_room.refused()
                await self.find_room(growth_bytes)
            except (NoSpace, OSError):
                self.store.blocks.spoil(opened)
                raise
        raise AssertionError("the last attempt returns or raises")

    async def find_room(self, size_bytes: int) -> None:
        """Make room, waiting for it if something may go. Raises NoSpace."""
        await self.room.find(size_bytes, self.about_to_wait)

    def _write(
        self, fd: int, offset_bytes: int, data: memoryview, growth_bytes: int
    ) -> tuple[int, int, OSError | None]:
        """Write all of *data* if the device takes it; in a thread. It allocates *growth_bytes*.

        Returns how much it took, what the extent holds then, and why it took no more.
        """
        pool = self.store.pool
        failure = None
        done_bytes = 0
        try:
            if growth_bytes:
                pool.extents.reserve_write(fd, offset_bytes, len(data))
            while done_bytes < len(data):
                done_bytes += pool.syscalls.pwrite(fd, data[done_bytes:], offset_bytes + done_bytes)
        except OSError as error:
            failure = error
        return done_bytes, pool.extents.allocated_bytes(fd), failure

    async def sync(self, fh: int) -> None:
        """Make the bytes and the name of *fh*'s file durable (``--fsync=honour``)."""
        await self._in_thread(self.store.pool.syscalls.fsync, self.extent_fd(fh))
        await self.sync_names()

    async def sync_names(self) -> None:
        """Make every name so far durable, with the identities that a rebuild starts from."""
        pool = self.store.pool
        pool.background.hurry()
        pool.index.settle()
        waiting = pool.identities.waiting_for_sync()
        await self._in_thread(pool.sync)
        if waiting:
            pool.identities.all_synced(waiting)
            pool.background.hurry()
            await self._in_thread(pool.sync)

    async def _in_thread(self, work: Callable[..., R], *args: object) -> R:
        resume = self.about_to_wait()
        try:
            return await trio.to_thread.run_sync(work, *args, limiter=self._limiter)
        finally:
            resume()  # no checkpoint from here until the answer is written

    def open_directory(self, ino: InodeNo) -> HandleNo:
        """Open directory *ino*. Raises DeadInode, NotADirectory."""
        self.store.namespace.directory(ino)
        opened = self.store.pool.open_inodes.enter(ino, writer=False)
        return self.handles.open(HandleKind.DIRECTORY, 0, opened).fh

    def extent_fd(self, fh: int) -> int:
        """Return the descriptor that file handle *fh* is read by. Raises BadHandle, Damaged."""
        return self._extent_fd(self.handles.get(fh))

    def _extent_fd(self, handle: Handle) -> int:
        if handle.kind is HandleKind.DIRECTORY:
            raise BadHandle("a directory")
        return self.store.blocks.extent_fd(handle.opened)
