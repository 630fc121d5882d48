"""Tells the kernel what kvfs itself changed, from a thread of its own.

Dropping a name waits for the directory's lock, which a LOOKUP or CREATE that we have not answered
yet may hold: on the loop's thread that would be for ever. Nothing depends on a notification: an
OPEN or GETATTR of a gone inode is answered ESTALE, and the kernel looks the name up again.
"""

import logging
import queue
import threading
from typing import Final

from kvfs.types import InodeNo
from mount import kernel

_log: Final = logging.getLogger(__name__)
#: Names waiting to be told; above it they are not told, which costs a look-up each.
_BACKLOG_MAX: Final = 65_536


class Notifier:
    """The thread and its bounded queue."""

    def __init__(self, device_fd: int, *, tells: bool = True) -> None:
        """*tells* false, the kernel is told nothing and finds out by itself."""
        self._device_fd = device_fd
        self._tells = tells
        self._names: queue.Queue[tuple[InodeNo, bytes] | None] = queue.Queue(_BACKLOG_MAX)
        self._thread: threading.Thread | None = None
        self.told = 0
        self.untold = 0

    @property
    def backlog(self) -> int:
        """Names not told yet."""
        return self._names.qsize()

    def entry_vanished(self, parent: InodeNo, name: bytes) -> None:
        """Have the kernel forget *name* in *parent*."""
        if not self._tells:
            self.untold += 1
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="kvfs-notify", daemon=True)
            self._thread.start()
        try:
            self._names.put_nowait((parent, name))
        except queue.Full:
            self.untold += 1

    def stop(self) -> None:
        """End the thread as soon as it does not wait for the kernel; the mount is gone anyway."""
        if self._thread is not None:
            try:
                self._names.put_nowait(None)
            except queue.Full:
                return
            self._thread.join(timeout=1.0)

    def _work(self) -> None:
        while (entry := self._names.get()) is not None:
            try:
                kernel.notify_inval_entry(self._device_fd, *entry)
                self.told += 1
            except FileNotFoundError:
                self.told += 1  # the kernel did not know it
            except OSError as error:
                self.untold += 1
                _log.debug("kernel not told of %r: %s", entry[1], error)
