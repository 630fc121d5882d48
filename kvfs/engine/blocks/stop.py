"""The end of all open blocks, because the pool stops."""

import contextlib
import logging
from typing import Final

from kvfs.core.errors import Damaged
from kvfs.engine.blocks.blocks import Blocks
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.pool import Pool

_log: Final = logging.getLogger(__name__)


def close_all(pool: Pool, blocks: Blocks, *, all_closed: bool = False) -> bool:
    """Close every handle; False if a block could not be published and stays a draft.

    A draft that is still being written is not whole: its name is removed, and its writer gets an
    error at the next call. A block in rewrite loses its name too if its client can write on without
    a server (passthrough). With *all_closed* both keep it, because only the RELEASE was lost.
    """
    blocks.doubts.close()
    blocks.served.close()
    closed = blocks.last_closes.forget_all()
    blocks.truncating.close()
    settled = True
    for opened in list(pool.open_inodes.values()):
        if opened.ino not in closed:
            if opened.kept_open or not (all_closed and opened.flushed):
                opened.spoil()
            try:
                if opened.torn and not all_closed and _outlives(pool, blocks, opened):
                    opened.outlive()
            except OSError as error:
                _log.warning("inode %#x stays open in the index: %s", opened.ino, error)
                settled = False  # the next start decides, as after a kill
        for _ in range(opened.readers):
            blocks.close(opened, writer=False)
        for _ in range(opened.writers):
            blocks.close(opened, writer=True)
    return blocks.last_closes.end() and settled


def _outlives(pool: Pool, blocks: Blocks, opened: OpenInode) -> bool:
    """Whether a client of the ended mount can still write to the extent.

    Call it before the extent is measured, because a client that has just closed may have
    written until then. After an OSError the extent cannot be measured.
    """
    if opened.fd < 0:
        return False
    pool.syscalls.close(opened.fd)  # our own descriptor would count as a user
    opened.fd = -1
    outlives = pool.extents.is_written(opened.ino)
    with contextlib.suppress(Damaged):  # then its name was removed
        blocks.extent_fd(opened)
    return outlives
