"""Makes a whole pool durable: index, extents and identities together."""

import contextlib

from kvfs.core.errors import NoSpace
from kvfs.devices import Device
from kvfs.pool.final_bytes import FinalBytes, Marked
from kvfs.pool.identities import Identities
from kvfs.storage.index import Index
from kvfs.storage.run_state import distrust_index
from kvfs.storage.syscalls import Syscalls


class PoolSync:
    """The syncs of one pool. All of them block."""

    def __init__(
        self,
        device: Device,
        index: Index,
        identities: Identities,
        final_bytes: FinalBytes,
        syscalls: Syscalls,
        *,
        read_only: bool,
    ) -> None:
        self._device = device
        self._index = index
        self._identities = identities
        self._final_bytes = final_bytes
        self._syscalls = syscalls
        self._read_only = read_only
        #: Whether a sync has failed. The kernel reports a failure only once: the next sync succeeds
        #: (write_back.py).
        self.failed = False

    def at_stop(self) -> Marked:
        """Sync index and extents, because the next start trusts both after a clean stop.

        After a failed sync the page cache cannot be trusted: the kernel may have dropped what it
        could not write. The next start then rebuilds from what is durable.
        """
        try:
            marked = self.all()
            if marked.error is not None:
                distrust_index(self._device.pool_fd, self._syscalls)
            return marked
        except (NoSpace, OSError):
            with contextlib.suppress(OSError):
                distrust_index(self._device.pool_fd, self._syscalls)
            raise

    def all(self) -> Marked:
        """Make all published blocks and all names durable. A read-only pool has nothing to write.

        Call ``background.hurry`` before. Raises NoSpace, OSError.
        """
        if self._read_only:
            return Marked(True, None)
        self._index.settle()
        marked = self._final_bytes.mark_all(self.written)
        self._identities.attributes.begin_flush()
        self._syscalls.syncfs(self._device.pool_fd)  # for the identities
        self._identities.attributes.end_flush()
        self._identities.not_durable.forget_identified()
        return marked

    def written(self) -> None:
        """Make durable what was written to index, extents and identities; call it in a thread.

        Call ``background.hurry`` before, which writes queued identities, and ``index.settle``,
        which commits waiting rows. Raises OSError.
        """
        try:
            self._index.sync()
            self._syscalls.syncfs(self._device.pool_fd)
        except OSError:
            self.failed = True
            raise
