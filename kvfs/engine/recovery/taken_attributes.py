"""Attributes that come back from the files: after a start that went back to a checkpoint.

A change of attributes has a sequence number like a change of the name (core/attribute_record.py).
So the newer of index and file is known, and every inode has the old ones or the new ones.
"""

import stat
from collections.abc import Mapping

from kvfs.core.directory_policy import PIN
from kvfs.core.node_bound import attributes_bytes
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.engine.names.tree_change import replace_attributes
from kvfs.engine.recovery.file_claims import attributes_of
from kvfs.pool import ranks
from kvfs.pool.pool import Pool
from kvfs.storage.extents import Extents


def claimed_attributes(extents: Extents, ino: InodeNo, claim: InodeRecord) -> Mapping[bytes, bytes]:
    """Return the attributes of *ino*, which claims what *claim* says. Raises OSError."""
    found = attributes_of(extents, ino, claim)
    return {} if found is None else found.attributes


def take_attributes(pool: Pool, ino: InodeNo, record: InodeRecord, claim: InodeRecord) -> None:
    """Give *ino* the attributes of its file, if they are newer than *record* was.

    Its record is what the newer *claim* says already. Raises NoSpace, OSError.
    """
    found = attributes_of(pool.extents, ino, claim)
    if found is None or found.sequence <= record.sequence:
        return
    with pool.index.write() as txn:
        before = replace_attributes(txn, ino, found.attributes)
    growth_bytes = attributes_bytes(found.attributes) - attributes_bytes(before)
    pool.node_shares.set_attributes(ino, record, growth_bytes)
    if stat.S_ISDIR(record.mode):
        pool.policies.clear()  # a pin of it is found by the scan after the start
        return
    pool.pins.drop(ino)
    if found.attributes.get(PIN) == b"1":
        pool.pins.set(ino, claim.allocated_bytes)
    if stat.S_ISREG(record.mode):
        ranks.note_found(pool, ino, claim)
