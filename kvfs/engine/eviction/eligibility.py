"""Whether a block may be evicted now: the check after the plan, on the event loop."""

import contextlib
import stat
from collections.abc import Iterator
from typing import Final, NamedTuple

from kvfs.core.errors import Damaged
from kvfs.core.eviction_policy import Rank
from kvfs.core.lifecycle import State, label
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.pool import Pool
from kvfs.pool.rules.ranks import SMALL_BYTES, rank_of

#: Suffixes of files with the metadata of a block, added to its name or in place of its suffix:
#: LMCache GDS (K.kvcache.safetensors.metadata), Mooncake (K.bucket, K.meta).
_ADDED: Final = (b".metadata", b".meta")
_SWAPPED: Final = (b".meta",)


class Verdict(NamedTuple):
    """The check of a victim: its record if it may go; *used*: its space would not be free at once.

    *passing*: it would be in a moment, as only the pass that makes blocks durable has it open.
    """

    record: InodeRecord | None
    used: bool = False
    passing: bool = False


_NO: Final = Verdict(None)


def look_at(pool: Pool, ino: InodeNo) -> Verdict:
    """Return whether block *ino* may be evicted now, and whether somebody has it open or mapped."""
    record = pool.index.inode_or_miss(ino)
    if record is None or not stat.S_ISREG(record.mode):
        pool.heat.drop(ino)
        return _NO
    parent = pool.index.inode_or_miss(record.parent)
    if parent is None or not stat.S_ISDIR(parent.mode):
        # Its directory cannot be read, so the batch would fail. It stays until fsck repairs it.
        pool.ranks.keep(ino, record)
        return _NO
    why = obstacle(pool, ino, record, open_too=False)
    if why is None:
        passing = pool.final_bytes.opened(ino) is not None
        return Verdict(record, used=passing, passing=passing)
    opened = pool.open_inodes.get(ino)
    is_read = why == "mapped" or (opened is not None and not opened.writers)
    return Verdict(record, used=True) if is_read and why in ("open", "mapped") else _NO


def obstacle(pool: Pool, ino: InodeNo, record: InodeRecord, *, open_too: bool) -> str | None:
    """Return in a word or two why the block with *record* may not be evicted; None if it may."""
    policy = pool.policies.of(record.parent)
    if rank_of(record, policy.evict) is Rank.NEVER:
        pool.ranks.enter(ino, record)
        return label(State(record.state))
    if (why := pool.ranks.why_kept(ino, policy)) is not None:
        pool.ranks.enter(ino, record)  # the policy or pin may have been set just now
        if pool.heat.held_as(ino, Rank.KEPT) is not None:
            return why
    opened = pool.open_inodes.get(ino)
    if opened is not None and not opened.is_revocable:
        return None if open_too and not opened.writers else "open"
    return None if open_too or not _is_mapped(pool, ino, opened) else "mapped"


def _is_mapped(pool: Pool, ino: InodeNo, opened: OpenInode | None) -> bool:
    """Whether a process still has a block mapped that it has closed; False if it cannot be told."""
    if opened is not None and opened.fd >= 0:
        fd: int | None = opened.fd
    else:
        fd = pool.final_bytes.opened(ino)  # the pass that makes it durable is no user
    if fd is None:
        return pool.extents.is_used(ino)
    with contextlib.suppress(OSError):
        return pool.extents.in_use(fd)
    return False


def used_since(pool: Pool, ino: InodeNo, record: InodeRecord, since_ns: int) -> bool | None:
    """Return whether block *ino* was used since *since_ns* (``Pool.age_ns``); None: unknown.

    Uses are a store, a rename, utime, a lookup, an open. The heat has them all, except those that
    came between its last save and a kill of the server. The times of the block may show these. They
    are of the wall clock, which may have been set since: a time ahead of it says nothing.
    """
    unused_ns = pool.clock_ns() - max(record.atime_ns, record.mtime_ns, record.ctime_ns)
    if 0 <= unused_ns < pool.age_ns() - since_ns:
        return True
    return pool.heat.used_since(ino, since_ns)


def sidecars_of(pool: Pool, record: InodeRecord) -> Iterator[InodeNo]:
    """Yield the small files beside block *record* that are useless without it."""
    if record.size_bytes < SMALL_BYTES:
        return
    stem, dot, _ = record.name.rpartition(b".")
    names = [record.name + suffix for suffix in _ADDED]
    if dot and stem:
        names += [stem + suffix for suffix in _SWAPPED]
    for name in names:
        try:
            ino = pool.index.lookup(record.parent, name)
            beside = None if ino is None else pool.index.inode(ino)
        except Damaged:
            continue
        if ino is not None and beside is not None and beside.size_bytes < SMALL_BYTES:
            yield ino
