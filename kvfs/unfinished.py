"""What a server that did not stop leaves open in an index that is still good, and its end.

Drafts go: nobody will finish them, and nobody may take them for whole. Blocks that were being
rewritten in place are measured, since their extent is the truth. Neither touches a file: extents
without an inode are the sweep's.
"""

import logging
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from kvfs.errors import Damaged
from kvfs.extents import Extents
from kvfs.index import Index
from kvfs.index_transaction import WriteTransaction
from kvfs.lifecycle import State
from kvfs.records import (
    INODE_PREFIX,
    Counters,
    parse_inode,
    parse_inode_key,
    state_of_inode,
)
from kvfs.types import InodeNo, InodeRecord, Sequence

_log: Final = logging.getLogger(__name__)

_STEP: Final = 4096
_STAT_BLOCK_BYTES: Final = 512
_OPEN_STATES: Final = frozenset({State.DRAFT, State.REWRITE})


class Finished(NamedTuple):
    """How many drafts were dropped, and how many rewritten blocks were measured anew."""

    dropped: int
    measured: int


def finish_index(index: Index, extents: Extents) -> Finished:
    """End what is open in *index*; done again after a failure. Raises NoSpace, OSError, Damaged."""
    listed = index.unfinished()
    counters = index.counters()
    dropped = measured = 0
    for ino, record in _search(index) if listed is None else _listed(index, listed):
        status = extents.stat(ino) if record.state == State.REWRITE else None
        with index.write() as txn:
            if status is None:
                counters = _drop(txn, ino, record, counters)
                dropped += 1
            else:
                allocated_bytes = status.st_blocks * _STAT_BLOCK_BYTES
                growth_bytes = allocated_bytes - record.allocated_bytes
                counters = counters._replace(
                    used_bytes=counters.used_bytes + growth_bytes, sequence=counters.sequence + 1
                )
                again = record._replace(
                    state=State.PUBLISHED,
                    size_bytes=status.st_size,
                    allocated_bytes=allocated_bytes,
                    mtime_ns=status.st_mtime_ns,
                    sequence=Sequence(counters.sequence),
                )
                txn.put_inode(ino, again)
                measured += 1
            txn.put_counters(counters)
    with index.write() as txn:
        txn.put_unfinished(())
    return Finished(dropped, measured)


def _listed(index: Index, inos: Iterable[InodeNo]) -> Iterator[tuple[InodeNo, InodeRecord]]:
    """Yield those of *inos* that are open; others were removed or finished since."""
    for ino in inos:
        try:
            record = index.inode(ino)
        except Damaged as error:
            _log.warning("index: %s; fsck drops it", error)
            continue
        if record is not None and record.state in _OPEN_STATES:
            yield ino, record


def _search(index: Index) -> Iterator[tuple[InodeNo, InodeRecord]]:
    """Yield the open inodes of the whole index, a million rows a second."""
    after = b""
    while rows := index.rows(INODE_PREFIX, after, _STEP):
        after = rows[-1][0]
        for key, raw in rows:
            try:
                if state_of_inode(raw) in _OPEN_STATES:
                    yield parse_inode_key(key), parse_inode(raw)
            except Damaged as error:
                _log.warning("index: %s; fsck drops it", error)


def _drop(txn: WriteTransaction, ino: InodeNo, record: InodeRecord, counters: Counters) -> Counters:
    """Remove *ino* and its name; return the counters without it."""
    if txn.lookup(record.parent, record.name) == ino:
        txn.delete_name(record.parent, record.name, ino)
        parent = txn.inode(record.parent)
        if parent is not None:
            txn.put_inode(record.parent, parent._replace(entries=parent.entries - 1))
    txn.delete_inode(ino)
    txn.delete_xattrs(ino)
    return counters._replace(
        blocks=counters.blocks - 1, used_bytes=counters.used_bytes - record.allocated_bytes
    )
