"""What a change of the pool did to one inode, and why, as a value.

A change hands these to its followers once it is committed (kvfs/pool/pool_change.py): tables in
memory, identities, figures. So no caller has to update a table by hand.
"""

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple

from kvfs.core.types import NO_INODE, InodeNo, InodeRecord

Attributes = Mapping[bytes, bytes]
NO_ATTRIBUTES: Final[Attributes] = MappingProxyType({})


class Reason(StrEnum):
    """What asked for an eviction, as `kvfs status` and the metrics name it."""

    #: A store needed the space, or would soon.
    SPACE = "space"
    #: ``kvfs evict``, or ``kvfs drive drain``.
    COMMAND = "command"
    #: The index or the device takes no more names.
    NAMES = "names"
    #: Unused for longer than the policy ``ttl`` of its directory.
    TTL = "ttl"
    #: Its tenant stores more than its quota.
    QUOTA = "quota"
    #: A temporary file whose writer is gone. It is evicted first, whatever the space is for.
    ORPHAN = "orphan"


class Why(IntEnum):
    """Why an inode changed. An IntEnum, because hashing a plain Enum runs Python code."""

    CREATED = 0
    #: A finished draft that had lost its name got another one.
    RESTORED = 1
    #: A whole block is being written again.
    REOPENED = 2
    #: Space was allocated ahead of bytes, as for a slab.
    RESERVED = 3
    #: Its last writer closed it.
    CLOSED = 4
    RENAMED = 5
    #: The process that it belonged to has ended.
    SETTLED = 6
    #: Owner, mode or times.
    SET = 7
    #: Extended attributes.
    ATTRIBUTED = 8
    #: Another inode got its name.
    REPLACED = 9
    #: A client removed its name.
    REMOVED = 10
    #: kvfs removed its name: its bytes are lost, or nobody finishes it.
    LOST = 11
    EVICTED = 12
    #: The index follows what its file says, after a power loss.
    RECONCILED = 13
    #: The inode itself did not change: a scan found it, or a policy of many inodes changed.
    FOUND = 14
    #: Its last writer closed it, and then it was renamed: both in one change.
    STORED = 15
    #: Its unused reserve was freed, and it holds another number of bytes than was foreseen.
    TRIMMED = 16
    #: A second name of a block came, or went with the block or its linker; or the block's record
    #: says so.
    LINKED = 17
    #: A draft was made. No table needs to know it before it is whole.
    DRAFTED = 18
    #: Its bytes are on its drive now, and were in memory.
    MOVED = 19


class Changed(NamedTuple):
    """One inode before and after a change: None where it had no name, or has none now.

    ``lost`` and ``gained`` are the extended attributes that were removed and added: all of them
    for an inode that is removed or created, and in both for one that gets another owner.
    """

    ino: InodeNo
    before: InodeRecord | None
    after: InodeRecord | None
    why: Why
    lost: Attributes = NO_ATTRIBUTES
    gained: Attributes = NO_ATTRIBUTES
    #: The inode that has its name and its attributes now.
    heir: InodeNo = NO_INODE
    #: Why it was evicted.
    reason: Reason = Reason.SPACE
    #: For a directory that was pinned just now: the bytes that it held.
    pinned_bytes: int = 0
