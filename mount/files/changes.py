"""Changes of attributes (SETATTR), with what must be durable before the answer."""

import contextlib

from kvfs.core.errors import DeadInode, NoSpace
from kvfs.core.inode_rules import is_narrowed
from kvfs.core.types import PAGE_BYTES, InodeNo, InodeRecord
from kvfs.engine.attributes import NewAttributes
from kvfs.machine.processes import NOBODY
from mount.files.files import Files


class Changes:
    """Changes attributes of the files of one mount."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._store = files.store

    async def change(self, ino: InodeNo, change: NewAttributes, fh: int | None = None) -> None:
        """Apply *change* to *ino*, open as *fh*; raises what ``Attributes.change`` does, OSError.

        If it takes a permission away, that is durable before the answer, so that a power loss
        does not give it back.
        """
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
        opened = self._files.handles.get(fh).opened
        if not opened.writers or opened.fd < 0:
            return
        wanted = self._store.blocks.allocations.claim_length(opened, size_bytes)
        if wanted is not None:
            files = self._files
            # A sparse file needs none yet; any other error will fail the ftruncate, too.
            with contextlib.suppress(NoSpace, OSError):
                await files.room.allocate(opened, wanted, files.in_thread, files.about_to_wait)

    async def _say_durably(self, ino: InodeNo, record: InodeRecord) -> None:
        """Wait until the identity of *ino* is durable. Raises NoSpace, OSError."""
        pool = self._store.pool
        if not pool.durable.identities.is_said(ino, record):
            return
        pool.durable.identities.say_now(ino)
        await self._files.in_thread(pool.extents.make_durable, ino)

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
            return
        opened = blocks.open(ino, writer=True, truncate=False)
        try:
            if opened.identity_lingers:
                await self._files.in_thread(blocks.publishing.forget_durably, opened)
            attributes.change(ino, change)
        finally:
            blocks.close(opened, writer=True)
