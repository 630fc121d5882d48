"""What a new pool holds: an empty index with its root directory, and the first inode numbers."""

import os
import stat
import time
from typing import Final

from kvfs.index import Index
from kvfs.inode_numbers import InodeNumbers
from kvfs.lifecycle import State
from kvfs.records import Counters
from kvfs.syscalls import Syscalls
from kvfs.types import ROOT_INODE, InodeRecord, Sequence

_ROOT_MODE: Final = stat.S_IFDIR | 0o755


def found_pool(pool_fd: int) -> None:
    """Fill the new pool directory *pool_fd*; durable when it returns. Raises NoSpace, OSError."""
    syscalls = Syscalls()
    InodeNumbers.create(pool_fd, syscalls)
    path = f"/proc/self/fd/{pool_fd}/index"
    os.makedirs(path, mode=0o700, exist_ok=True)
    Index.create(path)
    with Index(path, syscalls=syscalls) as index:
        found_root(index, time.time_ns())
        index.sync()


def found_root(index: Index, now_ns: int) -> None:
    """Put the root directory into an empty *index*."""
    root = InodeRecord(
        mode=_ROOT_MODE,
        uid=0,
        gid=0,
        state=State.NODE,
        size_bytes=0,
        allocated_bytes=0,
        atime_ns=now_ns,
        mtime_ns=now_ns,
        ctime_ns=now_ns,
        btime_ns=now_ns,
        parent=ROOT_INODE,
        entries=0,
        subdirs=0,
        sequence=Sequence(1),
        name=b"",
    )
    with index.write() as txn:
        txn.put_inode(ROOT_INODE, root)
        txn.put_counters(Counters(directories=1, sequence=1))
