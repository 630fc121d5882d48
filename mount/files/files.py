"""Files as handles: open, create, release, on whichever data path there is.

Request handlers use this class, which knows nothing of messages. The data path decides how the
kernel reaches the bytes. An inode stays on one data path from its first handle to its last.
"""

import os
import stat
import time
from typing import Final

import trio

from kvfs.core.errors import (
    AccessDenied,
    BadHandle,
    Damaged,
    DeadInode,
    DeviceSilent,
    Exists,
    NoSpace,
    NotFound,
)
from kvfs.core.types import HandleNo, InodeNo, InodeRecord
from kvfs.machine.process_ends import Fate
from kvfs.machine.processes import NOBODY, SERVER, Maker
from kvfs.pool.open.open_inodes import Hand, OpenInode
from mount.files.callers import Admission, Callers, PresentRequest, surely_may_open
from mount.files.device_asks import DeviceAsks
from mount.files.device_shares import DeviceShares
from mount.files.handles import Handle, HandleKind
from mount.files.kernel_port import KernelPort
from mount.files.space_wait import SpaceQueue
from mount.fuse.late import AboutToWait
from mount.fuse.wire import Grant

#: How often a caller that waits for durability checks.
_SYNC_LOOK_S: Final = 0.002
_WRITABLE: Final = (os.O_WRONLY, os.O_RDWR)
#: Flags of an open that writes or truncates, which changes the state of the block.
NOT_A_READER: Final = os.O_ACCMODE | os.O_TRUNC


def is_writer(flags: int) -> bool:
    """Whether a handle with open(2) *flags* may write."""
    return flags & os.O_ACCMODE in _WRITABLE


class Files:
    """All open files and directories of one mount."""

    def __init__(self, port: KernelPort, request: PresentRequest) -> None:
        self.store = port.store
        self.handles, self.readers = port.handles, port.readers
        self._port = port
        self.request = request
        self._makers = port.store.pool.rules.leases.processes
        self.callers = Callers(request, port, self._makers)
        self.held = port.held
        self._admission = Admission(port.held, port.handles, self.callers, self.readers.give_up_one)
        self.about_to_wait = request.about_to_wait
        pool = port.store.pool
        self.asks = DeviceAsks(
            *(pool.background, request.about_to_wait, pool.space.probes),
            *(pool.settings.device_deadline_s, pool.settings.device_silent_s),
            DeviceShares(pool.space.accounts.device_work, self.callers.waiter),
        )
        self._calls = port.store.pool.syscalls
        self.room = SpaceQueue(port.store, self.asks)
        #: Bytes that READ requests have asked this process for.
        self.asked_bytes = 0

    def thread(self) -> int:
        """Return the thread that made the request being handled."""
        return self.request.present.tid

    def requester(self) -> Maker:
        """Return the process that made it."""
        return self._makers.of(self.request.present.tid, time.monotonic())

    def open(self, ino: InodeNo, flags: int) -> tuple[HandleNo, Grant]:
        """Open file *ino*. Raises TooManyOpen, and what ``Blocks.open`` raises."""
        if not flags & NOT_A_READER:
            return self._open_to_read(ino, flags)
        # Before anything is changed for it: an O_TRUNC would cost the block its name.
        self.asks.require_device(ino)
        self._admission.require_writer(self.held.directory_of(ino))
        writer, maker = is_writer(flags), self.requester()
        opened = self.store.blocks.open(
            ino,
            writer=writer,
            truncate=bool(flags & os.O_TRUNC),
            appends=bool(flags & os.O_APPEND),
            reads=flags & os.O_ACCMODE != os.O_WRONLY,
            maker=maker,
            thread=self.thread(),
        )
        return self._granted(opened, flags, writer=writer, served=maker == SERVER, maker=maker)

    def _open_to_read(self, ino: InodeNo, flags: int) -> tuple[HandleNo, Grant]:
        served = self._makers.servers.have(self.thread(), time.monotonic())
        readers, (uid, _, tid, request) = self.readers, self.request.present
        enter = readers.enter_served if served else readers.enter
        shared = enter(ino, flags, request, uid, tid)
        if shared is not None:
            return shared.handle.fh, shared.grant
        self._admission.require_reader(served=served, costs_one=self._port.path.holds_readers)
        self._port.path.prepare(ino)
        opened = self.store.blocks.open_to_read(ino, served=served)
        fh, grant = self._granted(opened, flags, writer=False, served=served)
        readers.share(self.handles.get(fh), grant, uid, tid)
        return fh, grant

    async def settle_rewrite(self, fh: HandleNo, aside: AboutToWait | None = None) -> None:
        """Wait until a whole block has no identity on the device, before a writer overwrites it.

        It takes one fsync, the first time a published block is opened for rewriting. Raises
        DeviceSilent, OSError, and then the handle is closed.
        """
        opened = self.handles.get(fh).opened
        publishing = self.store.blocks.publishing
        try:
            if opened.settling:
                await self.asks.settle(opened, aside)
            if publishing.must_forget(opened):
                await self.forget_durably(opened, aside)
        except (DeviceSilent, OSError):
            self._take_back(fh)
            raise

    def _take_back(self, fh: HandleNo) -> None:
        """Close writer's handle *fh*, which no client receives, once the device answers.

        Its row goes at once: a server that takes over would wait for a close that nobody sends.
        """
        handle = self.handles.close(fh)
        if handle.served:
            self.asks.after_all(lambda: self._end(handle), handle.opened.ino)
        else:
            appends = bool(handle.flags & os.O_APPEND)
            self.store.blocks.last_closes.take_back(handle.opened, appends=appends)

    async def forget_durably(self, opened: OpenInode, aside: AboutToWait | None = None) -> None:
        """Wait until the device has no identity of *opened*. Raises DeviceSilent, OSError."""
        await self.asks.transfer(self._calls.fsync, opened.fd, aside, ino=opened.ino, stores=True)
        self.store.blocks.publishing.note_forgotten(opened)

    def create(
        self,
        parent: InodeNo,
        name: bytes,
        mode: int,
        flags: int,
        uid: int,
        gid: int,
        *,
        roomless: bool = False,
    ) -> tuple[HandleNo, Grant, InodeNo, InodeRecord]:
        """Create and open a file. Raises what ``Blocks.create`` and ``Blocks.open`` raise."""
        self._admission.require_writer(parent)
        blocks, maker = self.store.blocks, self.requester()
        opened, record = blocks.create(
            parent,
            name,
            mode,
            uid,
            gid,
            maker,
            roomless=roomless,
            appends=bool(flags & os.O_APPEND),
            thread=self.request.present.tid,
        )
        if blocks.truncating.refusals:
            blocks.truncating.refusals.forget(self.thread())
        if not is_writer(flags):
            # A reading handle on a file that nobody writes: it is published at once, empty.
            blocks.enter_reader(opened)
            try:
                fh, grant = self._granted(opened, flags, writer=False, served=maker == SERVER)
            except BaseException:
                blocks.abandon(opened, writer=True)
                raise
            blocks.close(opened, writer=True)
            return fh, grant, opened.ino, blocks.present(opened.ino)
        fh, grant = self._granted(opened, flags, writer=True, served=maker == SERVER, maker=maker)
        return fh, grant, opened.ino, record

    async def open_or_create(
        self, parent: InodeNo, name: bytes, mode: int, flags: int, uid: int, gid: int
    ) -> tuple[HandleNo, Grant, InodeNo, InodeRecord]:
        """Create and open a file. Without O_EXCL an existing one is opened, as open(2) says.

        The kernel sends CREATE if it did not know the name. Call ``find_room_to_create`` before,
        with no checkpoint in between. Raises what ``create``, ``_require_open``, ``Blocks.open``
        and ``settle_rewrite`` raise.
        """
        try:
            return self.create(parent, name, mode, flags, uid, gid, roomless=True)
        except Exists:
            if flags & os.O_EXCL:
                raise
        ino = self.store.namespace.lookup(parent, name)
        self._require_open(ino, flags, uid, gid)
        fh, grant = self.open(ino, flags)
        await self.settle_rewrite(fh)
        return fh, grant, ino, self.store.blocks.present(ino)

    def _require_open(self, ino: InodeNo, flags: int, uid: int, gid: int) -> None:
        """Refuse what a CREATE must not open, because the kernel checks no permissions after it.

        Raises AccessDenied if the file is hidden from the caller. In other cases raises DeadInode:
        the kernel then looks the name up again, checks permissions, and sends an OPEN.
        """
        store, truncates = self.store, bool(flags & os.O_TRUNC)
        record = store.namespace.record(ino)
        sticky = store.namespace.directory(record.parent).mode & stat.S_ISVTX
        may = surely_may_open(record, flags, uid, gid, sticky=bool(sticky))
        seen = store.visibility.seen(ino, record, self.requester())
        if seen is None and not (may and truncates):
            raise AccessDenied(f"inode {ino} is hidden from the caller")
        if not may or (seen != ino and not truncates):
            reads = flags & os.O_ACCMODE != os.O_WRONLY
            truncating = store.blocks.truncating
            truncating.refuse_create(self.thread(), ino, truncates=truncates, reads=reads)
            raise DeadInode(f"inode {ino} is opened by its number")

    def trusts_created(self, record: InodeRecord) -> bool:
        """Whether the kernel may cache the name that a CREATE just made.

        Not if another writer lost that name before: its rename would move the cached entry.
        """
        if self.store.blocks.truncating.displaced.contended(record.parent, record.name):
            return False
        return self.store.visibility.trusts_name(record, just_created=True)

    def _granted(
        self,
        opened: OpenInode,
        flags: int,
        *,
        writer: bool,
        served: bool,
        maker: Maker = NOBODY,
    ) -> tuple[HandleNo, Grant]:
        """Record the handle (*served*: a file server's) before the reply tells the kernel of it."""
        kind, path, blocks = HandleKind.READER, self._port.path, self.store.blocks
        asks = served and blocks.served.must_ask(opened)
        if writer:
            kind = HandleKind.WRITER
            opened.begin_flushes()
            if asks and opened.readers + opened.writers == 1:
                opened.must_ask()
        try:
            grant = path.grant(opened, writer=writer, asks=asks)
            if not (writer or grant.backing_id or path.holds_readers):  # read by this process
                self._admission.require_descriptor()
            handle = self.handles.open(
                kind, flags, opened, grant.backing_id, self.request.present.unique
            )
        except BaseException as error:
            if isinstance(error, Damaged):
                blocks.publishing.dismiss(opened, error)
            appends = writer and bool(flags & os.O_APPEND)
            blocks.abandon(opened, writer=writer, appends=appends)
            raise
        if served:
            self.handles.note_served(handle)
            blocks.served.opened(opened, writer=writer, passing=bool(grant.backing_id))
        if writer:
            self.handles.note_writer(handle, self.request.present.tid, maker)
        self._admission.admit(handle, costs_one=writer or not grant.backing_id)
        return handle.fh, grant

    def own_again(self, handle: Handle, uid: int, tid: int) -> None:
        """Note which process writes through *handle*: the killed server did not get to that."""
        maker = self._makers.of(tid, time.monotonic())
        self.handles.note_writer(handle, tid, maker)
        handle.opened.belong_to(maker)
        handle.opened.add_hand(Hand(maker, tid))
        if handle.uid < 0:
            self.handles.charge(handle, self.callers.payer_of(uid, tid))

    def granted_again(self, handle: Handle) -> Grant:
        """Return what *handle* was granted when it was opened."""
        writer = handle.kind is HandleKind.WRITER
        return self._port.path.granted(handle.backing_id, writer=writer)

    def release(self, fh: int, request: int | None = None) -> None:
        """Close handle *fh* for *request*, the present one; the last writer publishes.

        Raises BadHandle, NoSpace, NotAtHand.
        """
        handle = self.handles.get(fh)
        request = self.request.present.unique if request is None else request
        if handle.served:
            self.store.blocks.served.require_at_hand(handle.opened)
        if handle.kind is not HandleKind.WRITER:
            if not self.readers.close(handle, request):
                self._end(handle)
            return
        try:
            self._end(handle)
        finally:  # only now: the table must keep the writer until the block is published
            self.handles.close(fh, request)

    def _end(self, handle: Handle) -> None:
        """Close what *handle* has open."""
        blocks, opened = self.store.blocks, handle.opened
        writes = handle.kind is HandleKind.WRITER
        if handle.served:
            passing = bool(handle.backing_id)
            writes = blocks.served.closed(opened, writer=writes, passing=passing)
        if not writes:
            blocks.close(opened, writer=False)
            return
        closing = handle.closing
        if not handle.flushed:
            closing = blocks.publishing.never_closed(opened, handle.tid)
        appends = bool(handle.flags & os.O_APPEND)
        blocks.close(opened, writer=True, appends=appends, closing=closing, awaits_rename=True)

    def flush(self, fh: int, tid: int) -> None:
        """Note that thread *tid* closes a descriptor of *fh*; others may still be open.

        Raises NoSpace for a draft that was stopped, so that its writer learns of it.
        """
        handle = self.handles.get(fh)
        if handle.kind is HandleKind.WRITER:
            closing = self.store.blocks.publishing.look_at_closer(handle.opened, tid)
            before = handle.closing
            if before is None or before.fate is not Fate.UNKNOWN or before.tid <= 0:
                before = closing  # otherwise it is still open whether the earlier one lives
            self.handles.note_close(handle, before)
            self.store.watch.look_at_closing(handle.opened)
            if handle.opened.taken_unasked:
                self.held.stop_growth(handle, self.store.watch)
            handle.opened.flush()
            if handle.opened.overrun:
                raise NoSpace("its bytes were given back")

    async def find_room_to_begin(self, parent: InodeNo) -> None:
        """Make space for a draft in *parent*, or find that some may come.

        Raises NoSpace, OverShare.
        """
        payer = self.held.require_draft(parent, self.callers.payer())
        await self.room.find_to_begin(self.about_to_wait, payer)

    async def find_room_to_create(self, parent: InodeNo, name: bytes, flags: int) -> None:
        """Make space for a CREATE of *name*, or find that some may come. Raises NoSpace.

        It waits only for a moment, because the kernel has locked the directory.
        """
        try:
            self.store.namespace.lookup(parent, name)
        except NotFound:
            await self.find_room_to_begin(parent)
        else:
            if flags & os.O_TRUNC and not flags & os.O_EXCL:
                await self.find_room_to_begin(parent)

    async def sync(self, fh: int) -> None:
        """Make the bytes and the name of *fh*'s file durable (``--fsync=honour``)."""
        fd, opened = self.extent_fd(fh), self.handles.get(fh).opened
        opened.begin_transfer()
        try:
            await self.asks.transfer(self._calls.fsync, fd, ino=opened.ino, stores=False)
        finally:
            opened.end_transfer()
        await self.sync_names()

    async def sync_names(self) -> None:
        """Wait until all that was published so far is durable, with every name.

        Raises DeviceSilent, OSError.
        """
        pool, durable_pass = self.store.pool, self.store.durable_pass
        goal = durable_pass.goal()
        resume, since_s = self.about_to_wait(), trio.current_time()
        try:
            while not durable_pass.reached(goal):
                self.asks.require_answers(since_s)
                await trio.sleep(_SYNC_LOOK_S)
                pool.background.run_one()
        finally:
            resume()  # no checkpoint from here until the answer is written

    def open_directory(self, ino: InodeNo) -> HandleNo:
        """Open directory *ino*. Raises DeadInode, NotADirectory."""
        self.store.namespace.directory(ino)
        opened = self.store.pool.open.inodes.enter(ino, writer=False)
        request = self.request.present.unique
        return self.handles.open(HandleKind.DIRECTORY, 0, opened, request=request).fh

    def extent_fd(self, fh: int) -> int:
        """Return the descriptor that file handle *fh* is read by. Raises BadHandle, Damaged."""
        handle = self.handles.get(fh)
        if handle.kind is HandleKind.DIRECTORY:
            raise BadHandle("a directory")
        return self.store.blocks.extent_fd(handle.opened)
