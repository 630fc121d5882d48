"""What an open extent says of its block: size and times, while somebody may write it."""

import os

from kvfs.open_inodes import OpenInode
from kvfs.syscalls import Syscalls
from kvfs.types import STAT_BLOCK_BYTES, InodeRecord


def measured(syscalls: Syscalls, opened: OpenInode, record: InodeRecord) -> InodeRecord:
    """Return *record* with what *opened*'s extent tells; the same object if nothing was written.

    Raises OSError.
    """
    status = syscalls.fstat(opened.fd)
    if is_as_recorded(status, record):
        return record
    return record._replace(
        size_bytes=status.st_size,
        allocated_bytes=status.st_blocks * STAT_BLOCK_BYTES,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=max(record.ctime_ns, status.st_ctime_ns),
    )


def is_as_recorded(status: os.stat_result, record: InodeRecord) -> bool:
    """Whether nothing was written to an extent with *status* since *record* was made."""
    if status.st_size != record.size_bytes:
        return False
    if status.st_mtime_ns == record.mtime_ns:
        return True
    # A ready extent is older than its draft.
    return status.st_size == 0 and status.st_mtime_ns < record.btime_ns
