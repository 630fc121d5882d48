"""Bring a pool's index up after whatever happened to it.

A new pool gets its root; after a crash of the daemon the drafts that nobody will finish go.
"""

import os
import stat
import time

from kvfs.config import Settings
from kvfs.devices import Device
from kvfs.index import Index
from kvfs.lifecycle import State
from kvfs.records import Counters
from kvfs.run_state import read_run_state
from kvfs.syscalls import Syscalls
from kvfs.types import ROOT_INODE, InodeNo, InodeRecord, Sequence


def recover(device: Device, settings: Settings, syscalls: Syscalls) -> None:
    """Leave an index behind whose every block is whole. Raises IndexDamaged, FormatUnknown."""
    state = read_run_state(device.pool_fd, syscalls)
    path = f"/proc/self/fd/{device.pool_fd}/index"
    with Index(path, map_size_bytes=settings.index_map_bytes, syscalls=syscalls) as index:
        if index.inode(ROOT_INODE) is None:
            _found(index)
        if not state.clean:
            _drop_drafts(index, device, syscalls)


def _found(index: Index) -> None:
    now_ns = time.time_ns()
    root = InodeRecord(
        mode=stat.S_IFDIR | 0o755, uid=0, gid=0, state=State.NODE, size_bytes=0,
        allocated_bytes=0, atime_ns=now_ns, mtime_ns=now_ns, ctime_ns=now_ns, btime_ns=now_ns,
        parent=ROOT_INODE, entries=0, subdirs=0, sequence=Sequence(1), name=b"",
    )  # fmt: skip
    with index.write() as txn:
        txn.put_inode(ROOT_INODE, root)
        txn.put_counters(Counters(directories=1, sequence=1))


def _drop_drafts(index: Index, device: Device, syscalls: Syscalls) -> None:
    after = InodeNo(0)
    while rows := index.inodes(after, 1024):
        after = rows[-1][0]
        for ino, record in rows:
            if record is None or record.state != State.DRAFT:
                continue
            parent = index.inode(record.parent)
            counters = index.counters()
            with index.write() as txn:
                txn.delete_name(record.parent, record.name, ino)
                txn.delete_inode(ino)
                txn.delete_xattrs(ino)
                if parent is not None:
                    txn.put_inode(record.parent, parent._replace(entries=parent.entries - 1))
                txn.put_counters(counters._replace(blocks=counters.blocks - 1))
    _ = os
