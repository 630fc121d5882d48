"""The second name of a block, which link(2) leaves behind: an inode of its own in the index. Pure.

``link(a, b)`` gives the block the name *b*, as a rename does. *a* becomes its *alias*: a record
without bytes, kind or identity, which has that name and belongs to the process that linked. The
``target`` of either record is the number of the other one. A name row of an alias leads to the
block, so a lookup does not notice it (docs/dev/format.md).
"""

import stat
import struct
from typing import Final

from kvfs.core.inode_rules import blank_record
from kvfs.core.lifecycle import HELD, UNFINISHED, State
from kvfs.core.types import NO_INODE, InodeNo, InodeRecord, Sequence

_TARGET: Final = struct.Struct("<Q")
#: The kind of file in the mode of an alias: none (inode(7)).
_NO_KIND: Final = 0


def alias_of(record: InodeRecord) -> InodeNo:
    """Return the alias of the block with *record*; 0 if it has one name, or is no block."""
    return _number_in(record.target) if record.target and stat.S_ISREG(record.mode) else NO_INODE


def block_of(alias: InodeRecord) -> InodeNo:
    """Return the block that record *alias* is a name of; 0 if it does not say."""
    return _number_in(alias.target)


def with_alias(record: InodeRecord, alias: InodeNo) -> InodeRecord:
    """Return the record of a block, which has *alias* from now on."""
    return record._replace(target=_TARGET.pack(alias))


def without_alias(record: InodeRecord) -> InodeRecord:
    """Return the record of a block with one name."""
    return record._replace(target=b"")


def lead_to(alias: InodeRecord, block: InodeNo) -> InodeRecord:
    """Return the record *alias* as a name of *block*."""
    return alias._replace(target=_TARGET.pack(block))


def new_alias(
    block: InodeNo, record: InodeRecord, now_ns: int, sequence: Sequence, maker: tuple[int, int]
) -> InodeRecord:
    """Return the record of an alias of *block* under the name in *record*.

    *maker*: the tgid and birth of the process that linked it.
    """
    tgid, birth = maker
    blank = blank_record(record.parent, record.name, _NO_KIND, record.uid, record.gid, now_ns)
    return blank._replace(
        state=State.ALIAS,
        sequence=sequence,
        target=_TARGET.pack(block),
        maker_tgid=tgid,
        maker_birth=birth,
    )


def may_be_linked(record: InodeRecord, *, writes: bool, owns: bool) -> bool:
    """Whether a process may link the block with *record*, which it *writes* or *owns*.

    Only what a rename would publish: a draft of its own, or what it has closed under the name that
    it was created with. A published block belongs to nobody. Whoever linked it to another name
    would take the first one away, when the linker ends.
    """
    return writes if record.state in UNFINISHED else owns and record.state in HELD


def _number_in(target: bytes) -> InodeNo:
    return InodeNo(_TARGET.unpack(target)[0]) if len(target) == _TARGET.size else NO_INODE
