"""Extents for the event loop's thread: what needs the device is not at hand, and is fetched.

The loop opens what the kernel has in memory. For all else it raises NotAtHand; a thread then opens
the extent by O_PATH, which counts as no user of it. That descriptor keeps it in memory until the
request asks again, and is what the loop opens it by. While no loop serves requests, the device is
asked at once.
"""

import functools
import os
from collections import Counter
from collections.abc import Callable
from typing import Final

from kvfs.core.errors import Damaged, NotAtHand
from kvfs.core.records import Identity
from kvfs.core.types import InodeNo
from kvfs.storage.background import Background
from kvfs.storage.extents import Extents
from kvfs.storage.syscalls import Syscalls

#: The most extents that are kept in memory for requests that will ask again.
_KEPT_MAX: Final = 64


class ExtentsAtHand:
    """Opens, looks at and closes the extents of one pool, on the loop's thread."""

    def __init__(self, extents: Extents, background: Background, syscalls: Syscalls) -> None:
        self._extents = extents
        self._background = background
        self._syscalls = syscalls
        #: O_PATH descriptors of what was fetched, or why that failed, and identities, since the
        #: last tick; and those of the tick before.
        self._fresh: dict[InodeNo, int | Exception] = {}
        self._old: dict[InodeNo, int | Exception] = {}
        #: How many of our own descriptors of each extent are being closed.
        self._closing: Counter[InodeNo] = Counter()
        self._identities: dict[InodeNo, Identity | Exception | None] = {}
        self._old_identities: dict[InodeNo, Identity | Exception | None] = {}

    def require(self, ino: InodeNo) -> None:
        """Raise NotAtHand unless *ino*'s extent can be opened at once; Damaged, OSError."""
        if self._background.is_serving:
            os.close(self.open(ino, os.O_PATH))

    def open(self, ino: InodeNo, flags: int) -> int:
        """Open *ino*'s extent with *flags*. Raises NotAtHand, Damaged, OSError."""
        if not self._background.is_serving:
            return self._extents.open(ino, flags)
        fd = self._extents.open_cached(ino, flags)
        if fd >= 0:
            return fd
        for fetched in (self._fresh.get(ino), self._old.get(ino)):
            if isinstance(fetched, Exception):
                raise fetched
            if fetched is not None:
                return self._extents.reopen(fetched, flags)
        raise NotAtHand("an extent", lambda: functools.partial(self._fetch, ino), ino=ino)

    def close(self, ino: InodeNo, fd: int) -> None:
        """Close *fd* of *ino*; the last close of an extent may free blocks, and so may wait."""
        self._closing[ino] += 1
        self._background.of(ino).device.submit(
            functools.partial(self._syscalls.close, fd), functools.partial(self._closed, ino)
        )

    def _closed(self, ino: InodeNo, _: None) -> None:
        self._closing[ino] -= 1
        if not self._closing[ino]:
            del self._closing[ino]

    def stat(self, ino: InodeNo) -> os.stat_result | None:
        """Return the stat of *ino*'s extent, None if there is none. Raises NotAtHand, OSError."""
        if not self._background.is_serving:
            return self._extents.stat(ino)
        try:
            fd = self.open(ino, os.O_PATH)
        except Damaged:
            return None
        try:
            return self._syscalls.fstat(fd)
        finally:
            os.close(fd)

    def is_used(self, ino: InodeNo) -> bool:
        """Whether another process has *ino*'s extent, which is closed here, open or mapped.

        What is not in the kernel's memory nobody has open. While our own descriptor is being closed
        that cannot be told: False, for it is looked at again before the extent is unlinked.
        """
        if not self._background.is_serving:
            return self._extents.is_used(ino)
        if ino in self._closing:
            return False
        try:
            # Not to write: such a close frees no blocks, and waits for nothing
            # (xfs_file_release() in fs/xfs/xfs_file.c).
            fd = self._extents.open_cached(ino, os.O_RDONLY)
        except (Damaged, OSError):
            return False
        if fd < 0:
            return False
        try:
            return self._extents.in_use(fd)
        except OSError:
            return False  # no leases here, so a closed extent counts as unused
        finally:
            os.close(fd)

    def identity(self, ino: InodeNo) -> Identity | None:
        """Return the identity of *ino*'s extent. Raises NotAtHand, Damaged, OSError."""
        if not self._background.is_serving:
            return self._extents.identity(ino)
        for fetched in (self._identities, self._old_identities):
            if ino in fetched:
                found = fetched.pop(ino)
                if isinstance(found, Exception):
                    raise found
                return found
        raise NotAtHand(
            "an identity", lambda: functools.partial(self._fetch_identity, ino), ino=ino
        )

    def run_due(self) -> None:
        """Let go of what was fetched, but for what came since the last tick."""
        for fetched in self._old.values():
            if isinstance(fetched, int):
                os.close(fetched)
        self._old, self._fresh = self._fresh, {}
        self._old_identities, self._identities = self._identities, {}

    def forget(self, ino: InodeNo) -> None:
        """Let go of what was fetched of *ino*, whose extent is another file now."""
        for fetched in (self._fresh.pop(ino, None), self._old.pop(ino, None)):
            if isinstance(fetched, int):
                os.close(fetched)

    def let_go(self) -> None:
        """Let go of all that was fetched, because the pool stops."""
        self.run_due()
        self.run_due()

    def _fetch(self, ino: InodeNo) -> Callable[[], None]:
        """Open *ino*'s extent, in a thread; why it cannot be opened is kept, too."""
        was_in_memory = self._is_in_memory(ino)
        try:
            found: int | Exception = self._extents.open(ino, os.O_PATH)
        except (Damaged, OSError) as error:
            found = error
        return lambda: self._keep(ino, found, was_in_memory=was_in_memory)

    def _is_in_memory(self, ino: InodeNo) -> bool:
        memory = self._extents.memory
        return memory is not None and ino in memory

    def _keep(self, ino: InodeNo, found: int | Exception, *, was_in_memory: bool) -> None:
        """Keep what was *found*, unless the extent has become another file meanwhile."""
        if ino in self._fresh or (was_in_memory and not self._is_in_memory(ino)):
            if isinstance(found, int):
                os.close(found)
            return
        self._fresh[ino] = found
        if len(self._fresh) > _KEPT_MAX:
            oldest = self._fresh.pop(next(iter(self._fresh)))
            if isinstance(oldest, int):
                os.close(oldest)

    def _fetch_identity(self, ino: InodeNo) -> Callable[[], None]:
        try:
            identity: Identity | Exception | None = self._extents.identity(ino)
        except (Damaged, OSError) as error:
            identity = error
        return lambda: self._keep_identity(ino, identity)

    def _keep_identity(self, ino: InodeNo, identity: Identity | Exception | None) -> None:
        if len(self._identities) < _KEPT_MAX:
            self._identities[ino] = identity
