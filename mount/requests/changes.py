"""SETATTR: the present time that it asks for, and what must be durable before its answer."""

import contextlib
import functools
from collections.abc import Callable
from typing import Final

from kvfs.core.errors import DeadInode, NoSpace, NotAtHand, OverShare
from kvfs.core.inode_rules import is_narrowed
from kvfs.core.types import PAGE_BYTES, SECOND_NS, InodeNo, InodeRecord
from kvfs.engine.attributes import NewAttributes
from kvfs.machine.processes import NOBODY
from mount.files.files import Files
from mount.fuse.wire import SETATTR_IN_BYTES, SETATTR_IN_TIMES, SETATTR_IN_VALID, Opcode

#: FATTR_ATIME_NOW and FATTR_MTIME_NOW of linux/fuse.h.
_ATIME_NOW: Final = 1 << 7
_MTIME_NOW: Final = 1 << 8
#: The identity follows the attributes: it is written when these are.
_ROUNDS: Final = 2


class PresentTime:
    """Puts the server's time into SETATTR requests that ask for the present time (UTIME_NOW).

    The kernel sends its own time, which advances in steps of some milliseconds. With that, a file
    just created could get a time before its creation.
    """

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns: Final = clock_ns

    def answers(self) -> dict[int, Callable[[int, int, memoryview], None]]:
        """Return the functions that change requests, by opcode; libfuse gets the requests then."""
        return {Opcode.SETATTR: self._stamp}

    def _stamp(self, _unique: int, _nodeid: int, request: memoryview) -> None:
        if len(request) < SETATTR_IN_BYTES:
            return  # it is refused next
        (valid,) = SETATTR_IN_VALID.unpack_from(request)
        if not valid & (_ATIME_NOW | _MTIME_NOW):
            return
        now_s, now_ns = divmod(self._clock_ns(), SECOND_NS)
        offset_bytes = SETATTR_IN_VALID.size
        atime_s, mtime_s, ctime_s, atime_ns, mtime_ns, ctime_ns = SETATTR_IN_TIMES.unpack_from(
            request, offset_bytes
        )
        if valid & _ATIME_NOW:
            atime_s, atime_ns = now_s, now_ns
        if valid & _MTIME_NOW:
            mtime_s, mtime_ns = now_s, now_ns
        times = (atime_s, mtime_s, ctime_s, atime_ns, mtime_ns, ctime_ns)
        SETATTR_IN_TIMES.pack_into(request, offset_bytes, *times)


class Changes:
    """Changes attributes of the files of one mount; narrower permissions are durable before."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._store = files.store

    async def change(self, ino: InodeNo, change: NewAttributes, fh: int | None = None) -> None:
        """Apply *change* to *ino*, open as *fh*; raises what ``Attributes.change`` does, OSError.

        If it takes a permission away, that is durable before the answer, so that a power loss
        does not give it back.
        """
        opened = self._store.pool.open.inodes.get(ino)
        # Its extent changes, too. Else only the index does, and later its identity.
        if change.size_bytes is not None:
            self._files.asks.require_device(ino)
        elif opened is not None and opened.writers:
            self._files.asks.require_room(ino)
        if fh is not None and change.size_bytes:
            await self._allocate_length(fh, change.size_bytes)
        if (change.mode, change.uid, change.gid) == (None, None, None):
            await self._change(ino, change)
            return
        before = self._store.blocks.present(ino)
        await self._change(ino, change)
        if is_narrowed(before, self._store.blocks.present(ino)):
            for shown in self._store.attributes.bearers(ino):
                with contextlib.suppress(DeadInode):  # it was removed meanwhile
                    await self._say_durably(shown, self._store.blocks.present(shown))

    async def _allocate_length(self, fh: int, size_bytes: int) -> None:
        """Allocate space for open file *fh* before it gets *size_bytes* long, if there is any."""
        handle = self._files.handles.get(fh)
        opened = handle.opened
        if not opened.writers or opened.fd < 0:
            return
        wanted = self._store.blocks.allocations.claim_length(opened, size_bytes)
        if wanted is not None:
            files = self._files
            # A sparse file needs none yet; any other error will fail the ftruncate, too.
            with contextlib.suppress(NoSpace, OverShare, OSError):
                lacking_bytes = self._store.blocks.allocations.growth_bytes(opened, wanted)
                files.held.require_growth(handle, lacking_bytes)
                payer = files.held.payer(handle)
                await files.room.allocate(opened, wanted, files.about_to_wait, payer)

    async def _say_durably(self, ino: InodeNo, record: InodeRecord) -> None:
        """Wait until the identity of *ino* is durable. Raises NoSpace, OSError."""
        pool = self._store.pool
        if not pool.durable.identities.is_said(ino, record):
            return
        for _ in range(_ROUNDS):
            pool.durable.identities.say_now(ino)
            await self._files.asks.in_order(ino=ino)
        durable = functools.partial(self._make_durable, ino)
        lack = NotAtHand("a mode", lambda: durable, stores=True, ino=ino)
        await self._files.asks.bring(lack)

    def _make_durable(self, ino: InodeNo) -> Callable[[], None]:
        self._store.pool.extents.make_durable(ino)
        return lambda: None

    async def _change(self, ino: InodeNo, change: NewAttributes) -> None:
        """Apply *change*. Before a block is cut within a page, its identity is removed durably.

        The rest of that page gets zeros, which may reach the device before the new size does.
        """
        attributes, blocks, size_bytes = (
            self._store.attributes,
            self._store.blocks,
            change.size_bytes,
        )
        if (
            size_bytes is None
            or size_bytes % PAGE_BYTES == 0
            or size_bytes >= blocks.present(ino).size_bytes
        ):
            maker = self._files.requester() if size_bytes == 0 else NOBODY
            attributes.change(ino, change, maker)
            await self._settle(ino)
            return
        opened = blocks.open(ino, writer=True, truncate=False)
        try:
            await self._files.asks.settle(opened)
            if blocks.publishing.must_forget(opened):
                await self._files.forget_durably(opened)
            attributes.change(ino, change)
            await self._files.asks.settle(opened)
        finally:
            blocks.close(opened, writer=True)

    async def _settle(self, ino: InodeNo) -> None:
        """Wait until the extent has the times and the length that were set. Raises OSError."""
        opened = self._store.pool.open.inodes.get(ino)
        if opened is not None and opened.settling:
            await self._files.asks.settle(opened)
