"""What a new pool holds: an empty index with its root directory, and the first inode numbers."""

import os
import stat
import time
from typing import Final

from kvfs.core.inode_rules import blank_record
from kvfs.core.lifecycle import State
from kvfs.core.records import Counters
from kvfs.core.types import ROOT_INODE, Sequence
from kvfs.storage.index import Index
from kvfs.storage.inode_numbers import InodeNumbers
from kvfs.storage.syscalls import Syscalls

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
    root = blank_record(ROOT_INODE, b"", _ROOT_MODE, 0, 0, now_ns)
    root = root._replace(state=State.NODE, sequence=Sequence(1))
    with index.write() as txn:
        txn.put_inode(ROOT_INODE, root)
        txn.put_counters(Counters(directories=1, sequence=1))
