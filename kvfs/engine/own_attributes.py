"""Extended attributes that kvfs answers itself: a block's state, a directory's policies, pins.

They can be read by name, but are never listed.
"""

import contextlib
import stat
from typing import Final

from kvfs.core.directory_policy import (
    DRAFTS,
    EVICT,
    HINT,
    LEASE,
    NAMES,
    PIN,
    PREFIX,
    PUBLISH,
    TTL,
    check_value,
    ttl_text,
)
from kvfs.core.entitlements import Said, check_said, said_by
from kvfs.core.errors import Damaged, InvalidRequest, NoSuchAttribute, NotPermitted
from kvfs.core.eviction_policy import Rank
from kvfs.core.hints import NO_HINT
from kvfs.core.lifecycle import State, carries_identity, label
from kvfs.core.records import HAS_CRC
from kvfs.core.sizes import format_size
from kvfs.core.types import ROOT_INODE, InodeNo, InodeRecord
from kvfs.engine.eviction.units import NAMES_MAX, Units
from kvfs.engine.names.tree_change import show_drafts_anew
from kvfs.pool.open.ports import Room
from kvfs.pool.pool import Pool
from kvfs.pool.rules.policies import TOGETHER

STATE: Final = b"user.kvfs.state"
CRC32C: Final = b"user.kvfs.crc32c"
#: What a file may have itself.
_OF_FILES: Final = frozenset({PIN, HINT})


def is_own(name: bytes) -> bool:
    """Whether attribute *name* belongs to kvfs."""
    return name.startswith(PREFIX)


class OwnAttributes:
    """Reads these attributes of the inodes of one pool, and checks and applies changes of them."""

    def __init__(self, pool: Pool, room: Room) -> None:
        self._pool = pool
        self._room = room
        self._units = Units(pool)

    def value(self, ino: InodeNo, record: InodeRecord, name: bytes) -> bytes:
        """Return the value of *name* that is in force for *ino*. Raises NoSuchAttribute."""
        if name == STATE:
            return label(self._state(ino, record)).encode()
        if name == CRC32C:
            return self._crc32c(ino, record)
        if said_by(name) is not None:
            own = self._pool.index.xattr(ino, name)
            if own is None:
                raise NoSuchAttribute
            return own
        directory = ino if stat.S_ISDIR(record.mode) else record.parent
        policy = self._pool.rules.policies.of(directory)
        if name == DRAFTS:
            return b"owner" if policy.drafts_of_owner else b"all"
        if name == EVICT:
            return policy.evict.encode()
        if name == LEASE:
            return b"maker" if policy.leases else b"none"
        if name == PUBLISH:
            return b"rename" if policy.only_renamed else b"close"
        if name == TTL:
            return ttl_text(policy.ttl_s)
        if name in _OF_FILES:
            own = self._pool.index.xattr(ino, name)
            if own is not None:
                return own
            if name == PIN:
                return str(int(policy.pin)).encode()
            return NO_HINT if policy.hint is None else policy.hint.text
        raise NoSuchAttribute

    def _crc32c(self, ino: InodeNo, record: InodeRecord) -> bytes:
        """Return the checksum of a block's bytes, 8 hex digits. Raises NoSuchAttribute."""
        identity = None
        if stat.S_ISREG(record.mode) and ino not in self._pool.durable.not_durable:
            with contextlib.suppress(Damaged):
                identity = self._pool.at_hand.identity(ino)
        if identity is None or not identity.flags & HAS_CRC or not carries_identity(record):
            raise NoSuchAttribute
        return b"%08x" % identity.content_crc

    def _state(self, ino: InodeNo, record: InodeRecord) -> State:
        opened = self._pool.open.inodes.get(ino)
        if opened is not None and opened.gone is not None and not opened.stands_in:
            return State.GONE
        if opened is not None and opened.torn:
            return State.TORN
        return State(record.state)

    def check(
        self, ino: InodeNo, record: InodeRecord, name: bytes, value: bytes | None, uid: int
    ) -> int:
        """Raise unless user *uid* may set *name* to *value* (None: remove it).

        Return how many bytes a pin would keep, 0 for other attributes. Raises NotPermitted
        unless *uid* is root or the owner, and beyond the limit of pins; InvalidRequest for an
        unknown value. A hint may be set by all who may write the file or directory, which the
        kernel has checked.
        """
        if (said := said_by(name)) is not None:
            self._check_said(ino, record, said, value, uid)
            return 0
        if name not in NAMES:
            raise NotPermitted(f"{name!r} is told, not set")
        if uid not in (0, record.uid) and name != HINT:
            raise NotPermitted("only root and the owner set policies")
        if name not in _OF_FILES and not stat.S_ISDIR(record.mode):
            raise InvalidRequest(f"{name!r} belongs to directories")
        if value is not None:
            check_value(name, value)
        if name == EVICT and value == TOGETHER:
            self._require_small(ino)
        if name != PIN or value != b"1":
            return 0
        pool = self._pool
        kept_bytes = pool.rules.heat.held_bytes[Rank.KEPT]
        return pool.rules.pins.count(ino, record, kept_bytes, pool.space.bounds.kept_most_bytes)

    def _check_said(
        self, ino: InodeNo, record: InodeRecord, said: Said, value: bytes | None, uid: int
    ) -> None:
        """Raise unless user *uid* may say with *value* what a tenant is, or may store."""
        if uid != 0:
            raise NotPermitted("only root gives out quotas and weights, and makes tenants")
        if said.uid is not None and ino != ROOT_INODE:
            raise InvalidRequest("quotas and weights of users belong to the root directory")
        is_top = stat.S_ISDIR(record.mode) and record.parent == ROOT_INODE != ino
        if said.uid is None and not is_top:
            raise InvalidRequest("only a directory at the top of the mount can be a tenant")
        check_said(said, value)

    def _require_small(self, ino: InodeNo) -> None:
        """Raise NotPermitted if what is below directory *ino* is too large to go at once."""
        size = self._units.size(ino, to_be=True)
        if size.is_too_large:
            raise NotPermitted(
                f"together: {size.names:,} files and {format_size(size.size_bytes)} are more than "
                f"{NAMES_MAX:,} and {format_size(self._units.bound_bytes)} (together_max)"
            )

    def changed(self, record: InodeRecord, name: bytes) -> None:
        """Apply a change of *name*, already in the index, to all that inherits it.

        *record* is that of the inode it was set on. Nothing inherits from a file.
        """
        said = said_by(name)
        if said is not None and not said.makes_tenant:
            return
        if not stat.S_ISDIR(record.mode) or name == TTL:
            return  # no rank depends on it
        self._room.rank_anew()
        if name in (DRAFTS, PUBLISH):
            show_drafts_anew(self._pool)
