"""Eviction that an operator asks for: which blocks, in which order, and what became of each.

In small steps, since requests are answered between them; nothing is read in one that the next one
believes without looking again.
"""

import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kvfs.errors import Damaged, PathMissing, UsageError
from kvfs.evictable import rank_of
from kvfs.eviction import BURST_BITS
from kvfs.fitness import obstacle
from kvfs.namespace import Namespace
from kvfs.pool import Pool
from kvfs.reclaim import Reclaim
from kvfs.types import ROOT_INODE, InodeNo, InodeRecord

#: Names looked at, and blocks taken, in one step: a millisecond or two.
_LOOKED_AT: Final = 256
_TAKEN: Final = 32
_NS: Final = 1_000_000_000


class Order(NamedTuple):
    """What to evict; paths are below the mountpoint, "" is all of it."""

    paths: tuple[str, ...]
    size_bytes: int | None = None
    """Only so much, what was not used for longest first; None: all that the rest names."""
    older_than_s: float | None = None
    """Only what was stored, renamed or told to be warm (utime) longer ago."""
    dry_run: bool = False


class Progress:
    """How far it is; ``kept`` counts the blocks that may not go by the reason."""

    def __init__(self) -> None:
        self.looked_at = 0
        self.found_blocks = 0
        self.found_bytes = 0
        self.blocks = 0
        self.bytes = 0
        self.kept: Counter[str] = Counter()

    def shown(self) -> dict[str, object]:
        """Return it JSON-ready."""
        return {**vars(self), "kept": dict(self.kept)}


class _Found(NamedTuple):
    """A block that may go: the tuple's order is the order of going."""

    rank: int
    burst: int
    younger_first: int
    ino: InodeNo
    allocated_bytes: int


def find(pool: Pool, namespace: Namespace, path: str) -> InodeNo:
    """Return the inode at *path* below the mountpoint. Raises PathMissing."""
    ino = ROOT_INODE
    for name in filter(None, path.split("/")):
        found = None
        try:
            if stat.S_ISDIR(namespace.record(ino).mode):
                found = pool.index.lookup(ino, name.encode(errors="surrogateescape"))
        except Damaged:
            found = None
        if found is None:
            raise PathMissing(f"there is no {path} on this mount")
        ino = found
    return ino


def carry_out(
    pool: Pool, namespace: Namespace, reclaim: Reclaim, order: Order, progress: Progress
) -> Iterator[None]:
    """Evict as *order* says, a step at a time. Raises PathMissing, UsageError."""
    if order.size_bytes is not None and order.size_bytes <= 0:
        raise UsageError("give more than 0 bytes")
    roots = [find(pool, namespace, path) for path in order.paths]
    found: dict[InodeNo, _Found] = {}
    for root in roots:
        for ino in _below(pool, root):
            if ino == 0:
                yield
                continue
            progress.looked_at += 1
            one = _look(pool, ino, order, progress) if ino not in found else None
            if one is not None:
                found[ino] = one
                progress.found_blocks += 1
                progress.found_bytes += one.allocated_bytes
    chosen = _chosen(sorted(found.values()), order.size_bytes)
    for at in range(0, len(chosen), _TAKEN):
        batch = chosen[at : at + _TAKEN]
        if order.dry_run:
            progress.blocks += len(batch)
            progress.bytes += sum(one.allocated_bytes for one in batch)
        else:
            inos = [one.ino for one in batch]
            blocks, size_bytes = reclaim.take(inos, open_too=order.size_bytes is None)
            progress.blocks += blocks
            progress.bytes += size_bytes
            if blocks < len(batch):
                progress.kept["in use meanwhile"] += len(batch) - blocks
        yield


def _chosen(found: Sequence[_Found], size_bytes: int | None) -> Sequence[_Found]:
    if size_bytes is None:
        return found
    held_bytes = 0
    for count, one in enumerate(found):
        if held_bytes >= size_bytes:
            return found[:count]
        held_bytes += one.allocated_bytes
    return found


def _below(pool: Pool, root: InodeNo) -> Iterator[InodeNo]:
    """Yield each file at or below *root*, and 0 after every step."""
    waiting = [root]
    while waiting:
        at, after = waiting.pop(), InodeNo(0)
        record = _record(pool, at)
        if record is None:
            continue
        if not stat.S_ISDIR(record.mode):
            yield at
            continue
        while children := pool.index.children(at, after, _LOOKED_AT):
            after = children[-1][0]
            for ino, _ in children:
                child = _record(pool, ino)
                if child is not None and stat.S_ISDIR(child.mode):
                    waiting.append(ino)
                elif child is not None and stat.S_ISREG(child.mode):
                    yield ino
            yield InodeNo(0)


def _record(pool: Pool, ino: InodeNo) -> InodeRecord | None:
    try:
        return pool.index.inode(ino)
    except Damaged:
        return None


def _look(pool: Pool, ino: InodeNo, order: Order, progress: Progress) -> _Found | None:
    """Return block *ino* for the list, or count why it stays."""
    record = _record(pool, ino)
    if record is None:
        return None
    if order.older_than_s is not None:
        used_ns = max(record.atime_ns, record.mtime_ns, record.ctime_ns)
        if used_ns > pool.clock_ns() - int(order.older_than_s * _NS):
            return None
    why = obstacle(pool, ino, record, open_too=order.size_bytes is None)
    if why is not None:
        progress.kept[why] += 1
        return None
    rank = rank_of(record, pool.policies.of(record.parent).evict)
    burst = pool.heat.touched(ino) >> BURST_BITS
    return _Found(rank, burst, -ino, ino, record.allocated_bytes)
