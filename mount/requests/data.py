"""READ and WRITE on the daemon path: answered at once if nothing has to wait, else by a task.

They do not go through libfuse, which would copy the bytes twice more and wait for a thread.
Besides, the socket between libfuse and us loses an answer of a megabyte when memory is short, and
then the caller would wait for ever.
"""

import contextlib
import errno
import functools
import os
from collections.abc import Awaitable, Callable
from typing import Final

from kvfs.core.errors import NO_SPACE, BadHandle, DeviceSilent, NoSpace, NotAtHand, OverShare
from kvfs.pool.open.open_inodes import OpenInode
from mount.files.files import Files
from mount.files.handles import Handle, HandleKind
from mount.files.space_wait import DEVICE_TRIES
from mount.fuse.channel import Answer
from mount.fuse.late import AboutToWait, Late
from mount.fuse.wire import (
    OUT_HEADER,
    OUT_HEADER_BYTES,
    READ_IN,
    REQUEST_MAX_BYTES,
    TRANSFER_MAX_BYTES,
    WRITE_IN,
    WRITE_OUT,
    Message,
    Opcode,
    data_reply,
)

#: How much was written, what the extent holds then, and why no more was.
_Written = tuple[int, int, OSError | None]


class Transfers:
    """Reads and writes of open files, ``io_threads`` of them in threads at once."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._store: Final = files.store
        #: Whether the backing file system can write without blocking; ext4 and tmpfs cannot.
        self._writes_at_once = True

    def count_read(self, size_bytes: int) -> None:
        """Count a request for *size_bytes*: a client that reads in small pieces is slow here."""
        self._files.asked_bytes += size_bytes

    async def read(
        self,
        fh: int,
        offset_bytes: int,
        size_bytes: int,
        about_to_wait: AboutToWait | None = None,
    ) -> bytes:
        """Return up to *size_bytes* from *offset_bytes*, short only at the end of the file.

        *about_to_wait* is called before it waits for the device.
        """
        fd = self._files.extent_fd(fh)
        opened = self._files.handles.get(fh).opened
        pread = self._store.pool.syscalls.pread
        opened.begin_transfer()
        try:
            return await self._files.asks.transfer(
                lambda own_fd: pread(own_fd, size_bytes, offset_bytes),
                fd,
                about_to_wait,
                ino=opened.ino,
                stores=False,
            )
        except OSError as error:
            if error.errno == errno.EIO:
                self._dismiss(fh, error)
            raise
        finally:
            opened.end_transfer()

    def _dismiss(self, fh: int, error: OSError) -> None:
        """Remove the name of a block that the device cannot read, unless a writer may mend it."""
        opened = self._files.handles.get(fh).opened
        if not opened.writers and opened.gone is None:
            self._store.blocks.publishing.dismiss(opened, error)
            self._store.pool.departures.removed.give_way()

    def read_at_once(self, fh: int, offset_bytes: int, into: memoryview) -> int:
        """Read bytes that are in memory; return how many, fewer only at the end of the file.

        -1: some are not in memory, and ``read`` waits for the device. Raises BadHandle, Damaged.
        """
        fd = self._files.extent_fd(fh)
        try:
            # This thread must not block (RWF_NOWAIT, preadv2(2)).
            found_bytes = self._store.pool.syscalls.preadv(fd, [into], offset_bytes, os.RWF_NOWAIT)
            whole = found_bytes == len(into) or offset_bytes + found_bytes >= os.fstat(fd).st_size
        except OSError:
            return -1  # nothing is in memory; or the device fails, which ``read`` finds out
        return found_bytes if whole else -1

    async def write(
        self, fh: int, offset_bytes: int, data: bytes, about_to_wait: AboutToWait | None = None
    ) -> int:
        """Write *data* and return how much of it was taken. Raises NoSpace, TooLarge, OSError.

        *about_to_wait* is called before it waits for room.
        """
        handle = self._files.handles.get(fh)
        if handle.kind is not HandleKind.WRITER:
            raise BadHandle("not open for writing")
        fd = self._files.extent_fd(fh)
        try:
            leave = self._files.room.leave_memory
            await leave(handle.opened, offset_bytes, len(data), about_to_wait)
        except NoSpace:
            self._spoil(handle.opened)
            raise
        handle.opened.begin_transfer()
        try:
            return await self._write_with_room(handle, fd, offset_bytes, data, about_to_wait)
        finally:
            handle.opened.end_transfer()

    async def _write_with_room(
        self,
        handle: Handle,
        fd: int,
        offset_bytes: int,
        data: bytes,
        about_to_wait: AboutToWait | None,
    ) -> int:
        opened = handle.opened
        allocations = self._store.blocks.allocations
        find_room = functools.partial(
            self._files.room.find,
            ino=opened.ino,
            about_to_wait=about_to_wait,
            held_bytes=len(data),
            payer=self._files.held.payer(handle),
        )
        end_bytes = offset_bytes + len(data)
        growth_bytes = allocations.write_growth_bytes(opened, end_bytes, len(data))
        if growth_bytes:
            try:
                self._files.held.require_growth(handle)
                await find_room(growth_bytes)
                if await self._reserve_late(opened, fd, growth_bytes, about_to_wait):
                    growth_bytes = allocations.write_growth_bytes(opened, end_bytes, len(data))
                    if growth_bytes:
                        await find_room(growth_bytes)
            except (NoSpace, OverShare):
                self._spoil(opened)
                raise
        whole = memoryview(data)
        transfer = functools.partial(
            self._files.asks.transfer,
            fd=fd,
            about_to_wait=about_to_wait,
            ino=opened.ino,
            stores=True,
        )
        refused = functools.partial(self._files.room.device_refused, opened.ino, about_to_wait)
        return await self._write_all(
            *(opened, offset_bytes, whole, growth_bytes),
            find_room=find_room,
            device_refused=refused,
            transfer=transfer,
        )

    def _spoil(self, opened: OpenInode) -> None:
        """Note that a write was refused: what is written will not be whole."""
        opened.spoil()
        if opened.torn:
            self._store.pool.open.notes.writing(opened)

    def write_at_once(self, fh: int, offset_bytes: int, data: memoryview) -> bool:
        """Write all of *data* and return True, if there is room and no need to wait.

        If False, ``write`` must do it, from the start. Raises BadHandle, Damaged, TooLarge,
        OSError.
        """
        handle = self._files.handles.get(fh)
        if handle.kind is not HandleKind.WRITER or not self._writes_at_once:
            return False
        opened, pool, allocator = handle.opened, self._store.pool, self._store.allocator
        if pool.open.has_in_memory(opened.ino):
            return False  # tmpfs cannot say whether it would wait
        growth_bytes = self._store.blocks.allocations.write_growth_bytes(
            opened, offset_bytes + len(data), len(data)
        )
        fd, aside = self._files.extent_fd(fh), pool.background.is_serving
        opened.begin_transfer()  # eviction for its space must not take this file
        try:
            if growth_bytes:
                if allocator.late_reserve_bytes(opened, growth_bytes):
                    return False  # that allocation takes too long for this thread
                # No await from here to the account of what was allocated.
                self._files.held.require_growth(handle)
                allocator.require_space(growth_bytes, pool.space.drives.of(opened.ino))
                if aside and pool.device.fs_type == "xfs":
                    return False  # it allocates before it writes
                pool.extents.reserve_write(fd, offset_bytes, len(data))
            if not aside:
                # A new mtime is a transaction of the device's file system, for which RWF_NOWAIT
                # would refuse to wait. It is done first, and is short: an unlink takes longer.
                pool.syscalls.utime(fd)
            written_bytes = pool.syscalls.pwritev(fd, [data], offset_bytes, os.RWF_NOWAIT)
        except (NoSpace, NotAtHand, OverShare):
            return False  # ``write`` waits if that is worth it
        except OSError as error:
            self._writes_at_once = error.errno != errno.EOPNOTSUPP
            return False  # it would wait; or the device fails, which ``write`` finds out
        finally:
            opened.end_transfer()
            # The write may have filled holes, too.
            opened.note_allocated(pool.extents.allocated_bytes(fd), pool.space.of(opened.ino))
        return written_bytes == len(data)

    async def _reserve_late(
        self, opened: OpenInode, fd: int, growth_bytes: int, about_to_wait: AboutToWait | None
    ) -> bool:
        """Allocate the rest of a draft, if there is room now; False if nothing was done."""
        pool = self._store.pool
        end_bytes = self._store.allocator.late_reserve_bytes(opened, growth_bytes)
        if not end_bytes:
            return False
        lacking_bytes = end_bytes - opened.allocated_bytes
        pool.space.of(opened.ino).pledged_bytes += lacking_bytes
        try:
            with contextlib.suppress(NoSpace):
                await self._files.asks.transfer(
                    lambda own_fd: pool.extents.reserve_rest(own_fd, end_bytes),
                    fd,
                    about_to_wait,
                    ino=opened.ino,
                    stores=True,
                )
                opened.note_filled(end_bytes)
        finally:
            pool.space.of(opened.ino).pledged_bytes -= lacking_bytes
        if opened.ino in pool.open.inodes:
            opened.note_allocated(pool.extents.allocated_bytes(fd), pool.space.of(opened.ino))
        return True

    async def _write_all(
        self,
        opened: OpenInode,
        offset_bytes: int,
        data: memoryview,
        growth_bytes: int,
        *,
        find_room: Callable[[int], Awaitable[None]],
        device_refused: Callable[[], Awaitable[None]],
        transfer: Callable[[Callable[[int], _Written]], Awaitable[_Written]],
    ) -> int:
        """Write *data*, for which *growth_bytes* of room were found just now."""
        pool = self._store.pool
        done_bytes = 0
        for attempt in range(DEVICE_TRIES):
            # Atomic: no checkpoint since the room was found.
            pool.space.of(opened.ino).pledged_bytes += growth_bytes
            try:
                write = functools.partial(
                    self._write,
                    offset_bytes=offset_bytes + done_bytes,
                    data=data[done_bytes:],
                    growth_bytes=growth_bytes,
                )
                written_bytes, allocated_bytes, error = await transfer(write)
            except DeviceSilent:
                self._spoil(opened)
                raise
            finally:
                pool.space.of(opened.ino).pledged_bytes -= growth_bytes
            done_bytes += written_bytes
            if opened.ino in pool.open.inodes:
                opened.note_allocated(allocated_bytes, pool.space.of(opened.ino))
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
                await device_refused()
                await find_room(growth_bytes)
            except (NoSpace, OSError):
                self._spoil(opened)
                raise
        raise AssertionError("the last attempt returns or raises")

    def _write(self, fd: int, offset_bytes: int, data: memoryview, growth_bytes: int) -> _Written:
        """Write all of *data* if the device takes it; in a thread. It allocates *growth_bytes*.

        Returns how much it took, what the extent holds then, and why it took no more.
        """
        pool = self._store.pool
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


class DataRequests:
    """The two answers; both run on the trio thread and never wait.

    The channel answers with an errno for an exception, and for a malformed request.
    """

    def __init__(self, transfers: Transfers, late: Late, *, at_once: bool) -> None:
        """Without *at_once* a task answers every request."""
        self._transfers = transfers
        self._late = late
        self._at_once = at_once
        self._reply: Final = memoryview(bytearray(REQUEST_MAX_BYTES))

    def answers(self) -> dict[int, Answer]:
        """Return the answers by opcode."""
        return {Opcode.READ: self._read, Opcode.WRITE: self._write}

    def _read(self, unique: int, _nodeid: int, request: memoryview) -> Message | None:
        fh, offset_bytes, size_bytes, _, _, _, _ = READ_IN.unpack_from(request)
        if size_bytes > TRANSFER_MAX_BYTES:
            return None
        self._transfers.count_read(size_bytes)
        if self._at_once:
            data = self._reply[OUT_HEADER_BYTES : OUT_HEADER_BYTES + size_bytes]
            try:
                found_bytes = self._transfers.read_at_once(fh, offset_bytes, data)
            except NotAtHand:
                found_bytes = -1
            if found_bytes >= 0:
                length_bytes = OUT_HEADER_BYTES + found_bytes
                OUT_HEADER.pack_into(self._reply, 0, length_bytes, 0, unique)
                return self._reply[:length_bytes]
        return self._late.answer(
            unique,
            lambda: self._transfers.read(fh, offset_bytes, size_bytes, self._late.about_to_wait),
        )

    def _write(self, unique: int, _nodeid: int, request: memoryview) -> Message | None:
        fh, offset_bytes, size_bytes, _, _, _, _ = WRITE_IN.unpack_from(request)
        data = request[WRITE_IN.size :]
        if len(data) != size_bytes:
            return None
        if self._at_once and self._transfers.write_at_once(fh, offset_bytes, data):
            return data_reply(unique, WRITE_OUT.pack(size_bytes, 0))
        own = bytes(data)  # the next request overwrites that buffer

        async def write() -> bytes:
            aside = self._late.about_to_wait
            return WRITE_OUT.pack(await self._transfers.write(fh, offset_bytes, own, aside), 0)

        return self._late.answer(unique, write)
