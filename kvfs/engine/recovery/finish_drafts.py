"""After a killed server: drops drafts and measures rewritten blocks in an index that is sound.

Drafts are dropped: nobody will finish them, and nobody may take them for whole. Blocks that were
being rewritten in place, or written after their rename, are dropped too, unless nothing was written
and nobody can write any more; these lose their unused reserve. Slabs are measured, since their
extent is the truth. No file is removed here: the sweep does that to extents without an inode.
"""

import contextlib
import logging
import os
from collections.abc import Collection, Iterable, Iterator
from typing import Final, NamedTuple

from kvfs.core.changed import Changed, Why
from kvfs.core.errors import Damaged
from kvfs.core.inode_rules import alias_of, block_of, counted
from kvfs.core.lifecycle import UNFINISHED, State
from kvfs.core.records import (
    INODE_PREFIX,
    Counters,
    parse_inode,
    parse_inode_key,
    state_of_inode,
)
from kvfs.core.types import STAT_BLOCK_BYTES, InodeNo, InodeRecord, Sequence, round_up
from kvfs.engine.names.tree_change import drop_rows, put_counts
from kvfs.pool.open.extent_bytes import is_as_recorded
from kvfs.storage.drive_rows import read_drive_counts
from kvfs.storage.extents import BROKEN_FILE, Extents
from kvfs.storage.index import Index
from kvfs.storage.index_transaction import WriteTransaction

_log: Final = logging.getLogger(__name__)

_STEP: Final = 4096
_WHY: Final = Why.FOUND
#: States of blocks that somebody was writing, or may have been.
OPEN_STATES: Final = UNFINISHED | {State.RENAMED, State.REWRITE, State.SLAB}


class Finished(NamedTuple):
    """How many blocks were dropped, and how many that were open for writing were kept."""

    dropped: int
    measured: int


def finish_index(
    index: Index, extents: Extents, kept: Collection[InodeNo] = (), *, takes_over: bool = False
) -> Finished:
    """Finish the open inodes of *index*, except those *kept*, which clients still write.

    If this server *takes_over* a mount, all that clients write is *kept*. A block in rewriting that
    is not was opened by the last server itself, to truncate it: it is whole, before that or after,
    and the kernel sends the request again.

    After a failure it can be repeated. Raises NoSpace, OSError, Damaged.
    """
    listed = index.unfinished()
    counters, counts = index.counters(), read_drive_counts(index, extents.drives)
    dropped = measured = 0
    for ino, record in _search(index) if listed is None else _listed(index, listed):
        if ino in kept:
            continue
        again = _measured(extents, ino, record, by_server=takes_over)
        if again == record:
            continue
        with index.write() as txn:
            if again is None:
                counters = _drop(txn, ino, record, counters)
                dropped += 1
            else:
                counters = _put(txn, ino, record, again, counters)
                measured += 1
            txn.put_counters(counters)
            txn.put_drive_counts(recount := counts.after([Changed(ino, record, again, _WHY)]))
        counts.learn(recount)
        # Only now: a trim sets the mtime, by which a start that repeats this would call it written.
        if again is not None and (trimmed := _trimmed(extents, ino, again)) != again:
            with index.write() as txn:
                counters = _put(txn, ino, again, trimmed, counters)
                txn.put_counters(counters)
                txn.put_drive_counts(recount := counts.after([Changed(ino, again, trimmed, _WHY)]))
            counts.learn(recount)
    with index.write() as txn:
        txn.put_unfinished(kept)
    return Finished(dropped, measured)


def _put(
    txn: WriteTransaction, ino: InodeNo, before: InodeRecord, after: InodeRecord, counters: Counters
) -> Counters:
    """Write *after* in place of *before*; return the counters with it."""
    growth_bytes = after.allocated_bytes - before.allocated_bytes
    counters = counters._replace(
        used_bytes=counters.used_bytes + growth_bytes, sequence=counters.sequence + 1
    )
    txn.put_inode(ino, after._replace(sequence=Sequence(counters.sequence)))
    return counters


def _trimmed(extents: Extents, ino: InodeNo, record: InodeRecord) -> InodeRecord:
    """Return *record* without what its extent holds beyond its size, which is freed.

    A slab keeps its reserve, which it asked for. If the device refuses, the block keeps it, too.
    """
    if record.state == State.SLAB or record.allocated_bytes <= round_up(record.size_bytes):
        return record
    try:
        fd = extents.open(ino, os.O_RDWR)
        try:
            return record._replace(allocated_bytes=extents.trim(fd, record.size_bytes))
        finally:
            os.close(fd)
    except (Damaged, OSError) as error:
        _log.warning("a reserve is not freed: %s", error)
        return record


def _measured(
    extents: Extents, ino: InodeNo, record: InodeRecord, *, by_server: bool
) -> InodeRecord | None:
    """Return *record* as its extent now is, None if it must be dropped. Raises OSError.

    *by_server*: a block in rewriting was not written by a client.
    """
    state = State(record.state)
    # A client of the dead mount may still write without any server, by passthrough or a mapping.
    # Asked before the extent is measured: a client that closes now may have written until now.
    is_whole = by_server and state is State.REWRITE
    may_lack = state in (State.RENAMED, State.REWRITE) and not is_whole
    outlives = may_lack and extents.is_written(ino)
    try:
        status = None if record.state in UNFINISHED else extents.stat(ino)
    except OSError as error:
        if error.errno not in BROKEN_FILE:
            raise
        _log.warning("extent %#x is broken: %s", ino, error.strerror)
        return None
    if status is None or outlives:
        return None
    if may_lack and not is_as_recorded(status, record):
        return None
    if state in (State.RENAMED, State.REWRITE):
        # A block in rewriting may have been rewritten before, and so have no identity.
        state = State.PUBLISHED if state is State.RENAMED else State.REWRITTEN
    return record._replace(
        state=state,
        size_bytes=status.st_size,
        allocated_bytes=status.st_blocks * STAT_BLOCK_BYTES,
        mtime_ns=status.st_mtime_ns,
    )


def _listed(index: Index, inos: Iterable[InodeNo]) -> Iterator[tuple[InodeNo, InodeRecord]]:
    """Yield those of *inos* that are open; the others were removed or finished meanwhile."""
    for ino in inos:
        try:
            record = index.inode(ino)
        except Damaged as error:
            _log.warning("index: %s; fsck drops it", error)
            continue
        if record is not None and record.state in OPEN_STATES:
            yield ino, record


def _search(index: Index) -> Iterator[tuple[InodeNo, InodeRecord]]:
    """Yield the open inodes of the whole index, at a million rows a second."""
    for rows in index.walk(INODE_PREFIX, _STEP):
        for key, raw in rows:
            try:
                if state_of_inode(raw) in OPEN_STATES:
                    yield parse_inode_key(key), parse_inode(raw)
            except Damaged as error:
                _log.warning("index: %s; fsck drops it", error)


def _drop(txn: WriteTransaction, ino: InodeNo, record: InodeRecord, counters: Counters) -> Counters:
    """Remove *ino* and its name; return the counters without it.

    With a block goes its alias. If another row cannot be read, start and repair go on all the same:
    fsck mends the rest.
    """
    if alias := alias_of(record):
        with contextlib.suppress(Damaged):
            second = txn.inode(alias)
            if second is not None and second.state == State.ALIAS:
                counters = _drop(txn, alias, second, counters)
    leads_to = block_of(record) if record.state == State.ALIAS else ino
    try:
        named = txn.lookup(record.parent, record.name) == leads_to
    except Damaged as error:
        _log.warning("index: %s; it goes with its inode", error)
        named = True  # no other inode has this name
    drop_rows(txn, ino, record if named else None)
    if named:
        with contextlib.suppress(Damaged):
            parent = txn.inode(record.parent)
            if parent is not None:
                put_counts(txn, record.parent, parent.entries - 1, parent.subdirs)
    return counted(counters, record, -1)
