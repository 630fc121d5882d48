"""The xattrs of an extent or identity file: its identity, and the record of its attributes.

Each change takes several setxattr calls for one file, which reach the file system's log in order.
After a power loss between any two of them either the old or the new value is whole.
"""

import contextlib
import errno
import os
from typing import Final

from kvfs.core.errors import Damaged
from kvfs.core.records import (
    AttributeRecord,
    Identity,
    counting,
    pack_attributes,
    pack_identity,
    parse_attributes,
    parse_identity,
    sequence_of_identity,
)
from kvfs.core.types import InodeNo, Sequence
from kvfs.storage.syscalls import Syscalls

#: Values up to 254 bytes stay in an XFS inode of 1 KiB; one of 255 (the longest name alone)
#: takes a block, and 30 us instead of 4.
XATTR_FIXED: Final = "trusted.kvfs.fixed"
XATTR_NAME: Final = "trusted.kvfs.name"
#: The new name while an identity changes. The checksum shows which of the two names is valid.
XATTR_NEXT_NAME: Final = "trusted.kvfs.next"
#: Two slots for records of attributes, written in turn.
XATTR_SLOTS: Final = ("trusted.kvfs.attributes", "trusted.kvfs.attributes2")


class FileXattrs:
    """Reads and writes these xattrs; *file* is a path or an open descriptor."""

    def __init__(self, syscalls: Syscalls) -> None:
        self._syscalls = syscalls

    def set_identity(self, file: int | str, identity: Identity, target: bytes = b"") -> None:
        """Write *identity* in two setxattr calls, more for a changed name. Raises OSError."""
        fixed, name = pack_identity(identity, target)
        beside = False
        try:
            self._syscalls.setxattr(file, XATTR_NAME, name, os.XATTR_CREATE)
        except FileExistsError:
            if self._xattr(file, XATTR_NAME) != name:
                beside = self._put_beside(file, name, target)
        self._syscalls.setxattr(file, XATTR_FIXED, fixed)
        if beside:
            self._syscalls.setxattr(file, XATTR_NAME, name)
            self._syscalls.removexattr(file, XATTR_NEXT_NAME)

    def _put_beside(self, file: int | str, name: bytes, target: bytes) -> bool:
        """Store *name* for the next fixed part, beside the name that the present fixed part needs.

        Without a present fixed part, store it as the name and return False.
        """
        fixed, after_it = (self._xattr(file, key) for key in (XATTR_FIXED, XATTR_NEXT_NAME))
        if fixed is None:
            self._syscalls.setxattr(file, XATTR_NAME, name)
            return False
        if after_it is not None and _fits(fixed, after_it, target):  # a change that was interrupted
            self._syscalls.setxattr(file, XATTR_NAME, after_it)
        self._syscalls.setxattr(file, XATTR_NEXT_NAME, name)
        return True

    def identity(self, file: int | str, ino: InodeNo, target: bytes = b"") -> Identity | None:
        """Return the identity of *file*, None if it has none. Raises Damaged, OSError."""
        try:
            fixed, name = (self._xattr(file, key) for key in (XATTR_FIXED, XATTR_NAME))
        except FileNotFoundError:
            return None
        if fixed is None or name is None:
            return None
        try:
            identity = parse_identity(fixed, name, target)
        except Damaged:
            after_it = self._xattr(file, XATTR_NEXT_NAME)
            if after_it is None:
                raise
            identity = parse_identity(fixed, after_it, target)
        if identity.ino != ino:
            raise Damaged(f"file {ino:#x} carries the identity of {identity.ino:#x}")
        return identity

    # ---- attributes ----

    def set_attributes(self, file: int | str, record: AttributeRecord) -> None:
        """Write *record*, before the identity that it belongs to is written. Raises OSError.

        Writes nothing if the file has a record as new, or if it has none and *record* is empty.
        """
        slots = self._slots(file, record.ino)
        newest = max((slot.sequence for slot in slots if slot), default=None)
        if newest is None and not record.attributes:
            return
        if newest is not None and newest >= record.sequence:
            return
        kept = counting(slots, self._sequence(file))
        number = 1 if kept is not None and kept is slots[0] else 0
        self._syscalls.setxattr(file, XATTR_SLOTS[number], pack_attributes(record))

    def attributes(self, file: int | str, ino: InodeNo, upto: Sequence) -> AttributeRecord | None:
        """Return the record that is valid under an identity of sequence *upto*. Raises OSError."""
        return counting(self._slots(file, ino), upto)

    def _slots(self, file: int | str, ino: InodeNo) -> list[AttributeRecord | None]:
        """Return the record in each slot; None if it is empty, damaged or of another inode."""
        found: list[AttributeRecord | None] = []
        for key in XATTR_SLOTS:
            record = None
            raw = self._xattr(file, key)
            if raw is not None:
                with contextlib.suppress(Damaged):
                    record = parse_attributes(raw)
            found.append(record if record is not None and record.ino == ino else None)
        return found

    def _sequence(self, file: int | str) -> Sequence | None:
        """Return the sequence number of *file*'s identity, unchecked; None if it has none."""
        fixed = self._xattr(file, XATTR_FIXED)
        return None if fixed is None else sequence_of_identity(fixed)

    def _xattr(self, file: int | str, key: str) -> bytes | None:
        try:
            return self._syscalls.getxattr(file, key)
        except OSError as error:
            if error.errno == errno.ENODATA:
                return None
            raise


def _fits(fixed: bytes, name: bytes, target: bytes) -> bool:
    """Whether the checksum in *fixed* covers this *name*."""
    try:
        parse_identity(fixed, name, target)
    except Damaged:
        return False
    return True
