"""Blocks with two names: what happens to the one when the other goes (core/aliases.py).

Removing either name, or renaming over it, leaves the block with the other one, as on any file
system. The alias also goes alone: when the process that linked it has ended, or in a power loss.
"""

from kvfs.core.aliases import alias_of, block_of, without_alias
from kvfs.core.changed import Changed, Why
from kvfs.core.lifecycle import State
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.engine.names.tree_change import TreeChange, alias_record
from kvfs.pool.pool import Pool


def bearer(
    pool: Pool, parent: InodeNo, name: bytes, ino: InodeNo, record: InodeRecord
) -> tuple[InodeNo, InodeRecord]:
    """Return the inode whose record has *name*, which leads to *ino*: this one, or its alias."""
    if (record.parent, record.name) == (parent, name):
        return ino, record
    named = alias_record(pool.index, record)
    return (ino, record) if named is None else (alias_of(record), named)


def has_two(pool: Pool, record: InodeRecord) -> bool:
    """Whether the block with *record* has an alias; not if the alias's record cannot be read."""
    return alias_record(pool.index, record) is not None


def end_alias(pool: Pool, alias: InodeNo, record: InodeRecord) -> None:
    """Remove *alias*, and leave its block with one name. Raises NoSpace, OSError."""
    ino = block_of(record)
    block = pool.index.inode_or_miss(ino)
    with TreeChange(pool, pool.clock_ns()) as change:
        if block is not None and alias_of(block) == alias:
            change.drop_alias(block)
            change.write(Changed(ino, block, without_alias(block), Why.LINKED))
        else:
            change.unlink(alias, record, Why.LINKED)


def one_name(
    pool: Pool, ino: InodeNo, record: InodeRecord | None, below: InodeNo
) -> InodeRecord | None:
    """Return *record* of inode *ino* as it is without a second name from before a power loss.

    None if it is such a name itself. An alias has a number below *below* then, and is dropped: it
    has no file that would confirm it. Raises NoSpace, OSError.
    """
    if record is None:
        return None
    is_alias = record.state == State.ALIAS
    alias = ino if is_alias else alias_of(record)
    if not alias or alias >= below:
        return record
    named = record if is_alias else alias_record(pool.index, record)
    if named is None:
        return record
    end_alias(pool, alias, named)
    return pool.index.inode_or_miss(ino)
