"""Tells the kernel what kvfs itself changed, from a thread of its own.

Nothing depends on a notification: an OPEN or GETATTR of a gone inode is answered ESTALE, and the
kernel looks the name up again. So for an evicted block the kernel is only told that its attributes
are stale, which never blocks. Dropping a name waits for the directory's lock, which a LOOKUP or
CREATE that we have not answered yet may hold. On the event loop's thread that would be a deadlock,
and a server that is killed during it hangs, too. So names are dropped only where the inode lives
on.
"""

import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable
from typing import Final

from kvfs.core.types import InodeNo
from mount.fuse import kernel

_log: Final = logging.getLogger(__name__)
#: The most notifications that wait; more are skipped, which costs a look-up each.
_BACKLOG_MAX: Final = 65_536

#: Tells the kernel of one name. Raises OSError.
_Telling = Callable[[], None]


class Invalidations:
    """The thread and its bounded queue."""

    def __init__(self, device_fd: int, *, tells: bool = True) -> None:
        """If *tells* is false the kernel is told nothing and finds out by itself."""
        self._device_fd = device_fd
        self._tells = tells
        self._tellings: queue.Queue[_Telling | None] = queue.Queue(_BACKLOG_MAX)
        self._thread: threading.Thread | None = None
        #: Once true, the device may be closed, and its descriptor number reused for an extent.
        self._stopped = False
        self.sent = 0
        self.skipped = 0

    @property
    def backlog(self) -> int:
        """How many notifications are not sent yet."""
        return self._tellings.qsize()

    def entry_vanished(self, parent: InodeNo, name: bytes) -> None:
        """Have the kernel forget *name* in *parent*, whose inode may still be open."""
        self._tell(functools.partial(kernel.notify_inval_entry, self._device_fd, parent, name))

    def inode_vanished(self, ino: InodeNo, parent: InodeNo) -> None:
        """Have the kernel fetch the attributes of *ino*, which is gone, and *parent* anew."""
        self._tell(functools.partial(_inval_inodes, self._device_fd, ino, parent))

    def _tell(self, telling: _Telling) -> None:
        if not self._tells or self._stopped:
            self.skipped += 1
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="kvfs-notify", daemon=True)
            self._thread.start()
        try:
            self._tellings.put_nowait(telling)
        except queue.Full:
            self.skipped += 1

    def stop(self) -> None:
        """Send nothing any more: the mount is gone, and the device is closed next.

        Waits 1 s at most for the thread, which may be blocked in the kernel.
        """
        self._stopped = True
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._tellings.put_nowait(None)
            self._thread.join(timeout=1.0)

    def _work(self) -> None:
        while (telling := self._tellings.get()) is not None and not self._stopped:
            try:
                telling()
                self.sent += 1
            except FileNotFoundError:
                self.sent += 1  # the kernel did not know it
            except OSError as error:
                self.skipped += 1
                _log.debug("invalidation not sent: %s", error)


def _inval_inodes(device_fd: int, *inos: InodeNo) -> None:
    for ino in inos:
        with contextlib.suppress(FileNotFoundError):  # the kernel does not know it
            kernel.notify_inval_inode(device_fd, ino)
