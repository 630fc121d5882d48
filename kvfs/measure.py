"""What an open extent says of its block: size and times, while somebody may write it."""

from typing import Final

from kvfs.open_inodes import OpenInode
from kvfs.syscalls import Syscalls
from kvfs.types import InodeRecord

_STAT_BLOCK_BYTES: Final = 512


def measured(syscalls: Syscalls, opened: OpenInode, record: InodeRecord) -> InodeRecord:
    """Return *record* with what *opened*'s extent tells; the same object if nothing was written.

    Raises OSError.
    """
    status = syscalls.fstat(opened.fd)
    mtime_ns = status.st_mtime_ns
    size_bytes = status.st_size
    if size_bytes == record.size_bytes and (
        mtime_ns == record.mtime_ns or (size_bytes == 0 and mtime_ns < record.btime_ns)
    ):
        return record  # not written; a ready extent is older than its draft
    return record._replace(
        size_bytes=size_bytes,
        allocated_bytes=status.st_blocks * _STAT_BLOCK_BYTES,
        mtime_ns=mtime_ns,
        ctime_ns=max(record.ctime_ns, status.st_ctime_ns),
    )
