"""Removes the names of blocks that the device cannot read any more: they are misses, not EIO.

With passthrough the kernel reads for the client, and this process does not learn of an error. The
kernel's log reports it (kernel_log.py), though not every error and not which block. So for some
seconds after such a line all blocks that were in use are read once, in a thread.
"""

import logging
import os
from typing import Final

import numpy as np

from kvfs.core.errors import Damaged
from kvfs.core.types import InodeNo
from kvfs.engine.blocks.publishing import Publishing
from kvfs.pool.pool import Pool
from kvfs.storage.background import Aside
from kvfs.storage.extents import Extents

_log: Final = logging.getLogger(__name__)

#: The kernel drops lines after the tenth in five seconds (printk_ratelimited).
_SUSPECT_S: Final = 6.0
#: A block may have been used last this long before the line is read, at the next tick.
_BEFORE_S: Final = 1.0
#: Most inodes that a pass reads, so that it ends even on a failing device.
_INODES_MAX: Final = 4096
_PIECE_BYTES: Final = 1 << 20


class Unreadable:
    """Suspects blocks, tries to read them, and drops those that cannot be read."""

    def __init__(self, pool: Pool, publishing: Publishing) -> None:
        self._pool = pool
        self._publishing = publishing
        self._trial: Aside[list[InodeNo]] = Aside("kvfs-try-to-read")
        self._until_s = self._stamped_s = float("-inf")
        #: The heat's clock at two moments, the older at least ``_BEFORE_S`` ago.
        self._older = self._newer = pool.heat.stamp
        #: Blocks open when the first line came, as their readers may go on for hours.
        self._open: list[InodeNo] = []
        self._ended = False

    def suspect(self, now_s: float) -> None:
        """Note that the kernel's log reports a failed read of the device."""
        if now_s >= self._until_s:
            inodes = self._pool.open_inodes
            self._open = [ino for ino, opened in inodes.items() if opened.readers][:_INODES_MAX]
        self._until_s = now_s + _SUSPECT_S

    def tick(self, now_s: float) -> None:
        """Drop what the last trial could not read, and try what was used since."""
        for ino in self._trial.take() or ():
            opened = self._pool.open_inodes.get(ino)
            if opened is not None and opened.writers:
                continue  # its writer may write it again
            if self._publishing.dismiss_lost(ino):
                _log.error("inode %#x dropped: the device cannot read it", ino)
                self._pool.recently_removed.give_way()  # it must not be opened any more
        if now_s < self._until_s:
            if not self._trial.busy:
                self._try_some()
        elif now_s - self._stamped_s >= _BEFORE_S:
            self._older, self._newer = self._newer, self._pool.heat.stamp
            self._stamped_s = now_s

    def close(self) -> None:
        """Wait for a read that is under way."""
        self._ended = True
        self._trial.join()

    def _try_some(self) -> None:
        columns = self._pool.heat.columns()
        used = np.flatnonzero(columns.touched >= self._older)
        used = used[np.argsort(columns.touched[used])][-_INODES_MAX:]
        inos = [*self._open, *(InodeNo(ino) for ino in columns.ino[used].tolist() if ino)]
        self._open = []
        self._older = self._newer = self._pool.heat.stamp
        if inos:
            self._trial.start(lambda: [ino for ino in inos if self._fails(ino)])

    def _fails(self, ino: InodeNo) -> bool:
        """Whether a byte of the extent of *ino* cannot be read; in the thread."""
        return not self._ended and not is_legible(self._pool.extents, ino)


def is_legible(extents: Extents, ino: InodeNo) -> bool:
    """Whether the whole extent of *ino* can be read; one that is gone meanwhile counts as read."""
    piece = bytearray(_PIECE_BYTES)
    try:
        fd = extents.open(ino, os.O_RDONLY)
    except Damaged:
        return True
    except OSError:
        return False
    try:
        offset_bytes = 0
        while done_bytes := os.preadv(fd, [piece], offset_bytes):
            offset_bytes += done_bytes
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
