"""An inode's record in the index and its file's claim: whether they agree, and both merged.

A file lacks some fields: which process has a block's lease, when it was read, what a directory
holds.
"""

import stat

from kvfs.core.lifecycle import FINAL, SLABS
from kvfs.core.types import InodeRecord
from kvfs.engine.recovery.finish_drafts import OPEN_STATES


def has_bytes(record: InodeRecord) -> bool:
    """Whether *record* is that of a block: a regular file."""
    return stat.S_ISREG(record.mode)


def agrees(record: InodeRecord, claim: InodeRecord) -> bool:
    """Whether a published block's *record* is what its identity says."""
    return (
        record.state not in OPEN_STATES
        and record[:3] == claim[:3]
        and _said(record) == _said(claim)
    )


def _said(record: InodeRecord) -> tuple[object, ...]:
    return (record.parent, record.name, record.size_bytes, record.mtime_ns, record.sequence)


def _is_published_since(record: InodeRecord, claim: InodeRecord) -> bool:
    """Whether *claim* is of a block that was renamed or closed since *record* was written.

    A file does not say who has a block's lease. A block of the same kind and name still belongs to
    its maker, or is a temporary one that its maker left.
    """
    if not has_bytes(record):
        return False
    if (claim.parent, claim.name) != (record.parent, record.name):
        return True
    kind = FINAL if claim.state in FINAL else SLABS
    return record.state not in kind


def updated(record: InodeRecord, claim: InodeRecord) -> InodeRecord:
    """Return *record* with what the newer *claim* says of it."""
    if _is_published_since(record, claim):
        record = record._replace(state=claim.state, maker_tgid=0, maker_birth=0)
    return record._replace(
        mode=claim.mode,
        uid=claim.uid,
        gid=claim.gid,
        size_bytes=claim.size_bytes,
        allocated_bytes=claim.allocated_bytes,
        mtime_ns=claim.mtime_ns,
        parent=claim.parent,
        name=claim.name,
        sequence=claim.sequence,
        target=claim.target,
    )
