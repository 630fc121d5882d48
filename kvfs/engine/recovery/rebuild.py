"""Make a pool's index: an empty one for a new pool, or one from the identities.

The identities are those of extents, and the identity files. Such a rebuild is needed after a power
loss, which leaves the unsynced index in any state, and if it is damaged. A block comes back only if
it has an identity, which is written when its bytes are durable. What is lost is a miss;
docs/durability.md has the list.
"""

import functools
import logging
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from typing import Final, NamedTuple

from kvfs.core.errors import IndexDamaged, NoSpace
from kvfs.core.inode_rules import TreeCount, blank_record
from kvfs.core.lifecycle import State
from kvfs.core.records import (
    INODE_PREFIX,
    Counters,
    parse_inodes,
)
from kvfs.core.settings import Settings
from kvfs.core.types import ROOT_INODE, DriveNo, InodeNo, InodeRecord, Sequence
from kvfs.engine.names.tree_change import drop_rows, put_attributes, put_counts, put_rows
from kvfs.engine.recovery.file_claims import attributes_of, block_record, node_record
from kvfs.storage.extents import Extents
from kvfs.storage.index import Index
from kvfs.storage.index_place import IndexPlace, pool_index
from kvfs.storage.index_transaction import WriteTransaction
from kvfs.storage.inode_numbers import InodeNumbers
from kvfs.storage.row_log import forget_log
from kvfs.storage.syscalls import Syscalls

_log: Final = logging.getLogger(__name__)

#: Called with (done, total) now and then.
Progress = Callable[[int, int], None]

#: Claims in one transaction: LMDB copies each changed leaf once for all of them.
_BATCH: Final = 1024
#: The most that an inode takes of the index: its name four times in half-full pages, and the target
#: of a symlink.
_BLOCK_BYTES: Final = 4 << 10
_NODE_BYTES: Final = 16 << 10
#: Numbers used before INODES was lost may still be in NFS handles, so new ones begin far above
#: them. Of 2**64 numbers this wastes some that no pool will ever need.
_NUMBERS_LEFT_OUT: Final = 1 << 40
#: What a new pool's index is allocated ahead: the first mount takes it from there.
_FOUNDED_BYTES: Final = 1 << 20
_ROOT_MODE: Final = stat.S_IFDIR | 0o755


def found_pool(pool_fd: int) -> None:
    """Fill the new pool directory *pool_fd*; durable when it returns. Raises NoSpace, OSError."""
    syscalls = Syscalls()
    InodeNumbers.create(pool_fd, syscalls)
    path = pool_index(pool_fd)
    Index.create(path, preallocate_bytes=_FOUNDED_BYTES)
    with Index(path, preallocate_bytes=_FOUNDED_BYTES, syscalls=syscalls) as index:
        found_root(index, time.time_ns())
        index.sync()


def found_root(index: Index, now_ns: int) -> None:
    """Put the root directory into an empty *index*."""
    root = blank_record(ROOT_INODE, b"", _ROOT_MODE, 0, 0, now_ns)
    root = root._replace(state=State.NODE, sequence=Sequence(1))
    with index.write() as txn:
        txn.put_inode(ROOT_INODE, root)
        txn.put_counters(Counters(directories=1, sequence=1))


class _Claim(NamedTuple):
    """An inode, the name that it claims, and its attributes."""

    ino: InodeNo
    record: InodeRecord
    attributes: Mapping[bytes, bytes]


def rebuild_index(
    pool_fds: tuple[int, ...],
    place: IndexPlace,
    extents: Extents,
    settings: Settings,
    syscalls: Syscalls,
    progress: Progress | None = None,
    *,
    stale: Collection[DriveNo],
) -> str:
    """Make an index in *place* from the identities; return its path. In the pool it is durable.

    *pool_fds* are the directories of the pool's drives. Of drives that were away, and are *stale*,
    no file is believed: what it was may have been removed since.

    Extents that got no inode are left to the sweep. An old index in the pool is kept until the new
    one is complete. If there is no space for both, it is removed first, since nothing is read from
    it. Raises NoSpace, OSError.
    """
    rebuild = _Rebuild(pool_fds, place, extents, settings, syscalls, progress)
    unbelieved = set(stale) - extents.lost
    extents.lost.update(unbelieved)
    try:
        path, counters = rebuild.run()
    except NoSpace:
        if not place.in_pool:
            raise
        place.discard_in_pool()
        path, counters = rebuild.run()
    finally:
        extents.lost.difference_update(unbelieved)
    forget_log(pool_fds, syscalls)
    path = place.finish(path)
    _log.warning(
        "index rebuilt: %d blocks, %d directories, %d symlinks",
        counters.blocks,
        counters.directories,
        counters.symlinks,
    )
    return path


class _Rebuild:
    """One run: all claims are entered into ``index.new``, then what has no parent is dropped."""

    def __init__(
        self,
        pool_fds: tuple[int, ...],
        place: IndexPlace,
        extents: Extents,
        settings: Settings,
        syscalls: Syscalls,
        progress: Progress | None,
    ) -> None:
        self._pool_fds = pool_fds
        self._place = place
        self._extents = extents
        self._settings = settings
        self._syscalls = syscalls
        self._progress = progress
        self._highest = InodeNo(0)
        self._sequence = 0
        self._nodes = sum(1 for _ in extents.scan_nodes())
        self._blocks = sum(1 for _ in extents.scan())

    def run(self) -> tuple[str, Counters]:
        """Return the path of the new index, and its counters."""
        with self._place.building() as path:
            counters = self._fill(path)
        if not numbers_lie_behind(self._highest, self._pool_fds, self._syscalls):
            skip_numbers(self._highest, self._pool_fds, self._syscalls)
        return path, counters

    def _fill(self, path: str) -> Counters:
        settings = self._settings
        # Regardless of the setting: names beyond its limit are evicted later, one by one.
        needed_bytes = self._blocks * _BLOCK_BYTES + self._nodes * _NODE_BYTES
        Index.create(
            path,
            settings.index_map_bytes,
            preallocate_bytes=settings.index_preallocate_bytes,
            syscalls=self._syscalls,
        )
        with Index(
            path,
            map_size_bytes=max(2 * settings.index_map_bytes, needed_bytes),
            preallocate_bytes=settings.index_preallocate_bytes,
            syscalls=self._syscalls,
        ) as index:
            found_root(index, time.time_ns())
            claims = self._claims()
            while batch := list(islice(claims, _BATCH)):
                if index.preallocation_due():
                    index.preallocate()
                with index.write() as txn:
                    for claim in batch:
                        _settle_claim(txn, claim)
            counters = self._join(index)
            index.sync()
        return counters

    def _claims(self) -> Iterator[_Claim]:
        """Yield what is whole: directories and symlinks first, then blocks."""
        total = self._nodes + self._blocks
        done = 0
        for files, claim in (
            (self._extents.scan_nodes(), functools.partial(node_record, self._extents)),
            (self._extents.scan(), functools.partial(block_record, self._extents, self._syscalls)),
        ):
            for ino in files:
                done += 1
                if self._progress is not None and (done % _BATCH == 0 or done == total):
                    self._progress(done, total)
                self._highest = max(self._highest, self._extents.serial(ino))
                record = claim(ino)
                if record is not None:
                    self._sequence = max(self._sequence, record.sequence)
                    found = attributes_of(self._extents, ino, record)
                    yield _Claim(ino, record, {} if found is None else found.attributes)

    def _join(self, index: Index) -> Counters:
        """Drop what cannot be reached from the root; write and return the counts of the rest."""
        tree_count = TreeCount(index.inode, len(self._pool_fds))
        for rows in index.walk(INODE_PREFIX, _BATCH):
            cut_off = [
                (ino, record)
                for ino, record in parse_inodes(rows)
                if record is not None and not tree_count.count(ino, record)
            ]
            if cut_off:
                with index.write() as txn:
                    for ino, record in cut_off:
                        drop_rows(txn, ino, record)
        names = iter(tree_count.names.items())
        while batch := list(islice(names, _BATCH)):
            with index.write() as txn:
                for directory, (entries, subdirs) in batch:
                    put_counts(txn, directory, entries, subdirs)
        counters = tree_count.counters()
        counters = counters._replace(sequence=max(counters.sequence, self._sequence))
        with index.write() as txn:
            txn.put_counters(counters)
            txn.put_drive_counts(tree_count.by_drive.rows())
        return counters


def numbers_lie_behind(highest: InodeNo, pool_fds: tuple[int, ...], syscalls: Syscalls) -> bool:
    """Whether each INODES can be read, and the next serial numbers are above *highest*."""
    try:
        numbers = InodeNumbers(pool_fds, syscalls, read_only=True)
    except IndexDamaged:
        return False
    numbers.close()
    return numbers.first > highest


def skip_numbers(highest: InodeNo, pool_fds: tuple[int, ...], syscalls: Syscalls) -> None:
    """Write a new INODES to each drive, which begins far above the serial number *highest*.

    Durable on return. Raises OSError.
    """
    for pool_fd in pool_fds:
        InodeNumbers.create(pool_fd, syscalls, InodeNo(highest + _NUMBERS_LEFT_OUT))
        syscalls.fsync(pool_fd)


def _settle_claim(txn: WriteTransaction, claim: _Claim) -> None:
    """Enter *claim*; of two claims to one name the higher sequence number wins."""
    ino, record, attributes = claim
    if ino == ROOT_INODE:
        root = txn.inode(ROOT_INODE) or record
        txn.put_inode(ROOT_INODE, record._replace(atime_ns=root.atime_ns, btime_ns=root.btime_ns))
        put_attributes(txn, ino, attributes)
        return
    rival = txn.lookup(record.parent, record.name)
    if rival is not None:
        rival_record = txn.inode(rival)
        rank = (-1, -1) if rival_record is None else (rival_record.sequence, rival)
        if rank > (record.sequence, ino):
            return
        drop_rows(txn, rival, record)
    put_rows(txn, ino, record)
    put_attributes(txn, ino, attributes)
