"""The attribute record of an inode: its user xattrs, pin and policies, as its file keeps them.

Pure: bytes in, values out. A file has up to two of them, in slots that are written in turn, so that
one is always whole. The valid one has the highest sequence number that is not above that of the
file's identity (docs/dev/format.md).
"""

import struct
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from kvfs.core.checksum import CRC, CRC32C_RESIDUE, crc32c
from kvfs.core.errors import Damaged
from kvfs.core.types import InodeNo, Sequence

_VERSION: Final = 1
#: version, number of attributes, inode, sequence.
_HEAD: Final = struct.Struct("<B3xIQQ")
#: Lengths of a name and of its value.
_LENGTHS: Final = struct.Struct("<HI")
_CRC_BYTES: Final = 4


class AttributeRecord(NamedTuple):
    """The attributes (values by name) that *ino* had when its record had *sequence*."""

    ino: InodeNo
    sequence: Sequence
    attributes: Mapping[bytes, bytes]


def pack_attributes(record: AttributeRecord) -> bytes:
    """Return the bytes of *record*."""
    parts = [_HEAD.pack(_VERSION, len(record.attributes), record.ino, record.sequence)]
    for name, value in record.attributes.items():
        parts += (_LENGTHS.pack(len(name), len(value)), name, value)
    body = b"".join(parts)
    return body + CRC.pack(crc32c(body))


def parse_attributes(raw: bytes) -> AttributeRecord:
    """Return the record that *raw* holds; raises Damaged."""
    if crc32c(raw) != CRC32C_RESIDUE or len(raw) < _HEAD.size + _CRC_BYTES:
        raise Damaged("attribute record: checksum or length differs")
    version, count, ino, sequence = _HEAD.unpack_from(raw)
    if version != _VERSION:
        raise Damaged(f"attribute record: version {version} is unknown")
    attributes: dict[bytes, bytes] = {}
    at = _HEAD.size
    for _ in range(count):
        if at + _LENGTHS.size > len(raw) - _CRC_BYTES:
            raise Damaged("attribute record: it ends early")
        name_end = at + _LENGTHS.size + _LENGTHS.unpack_from(raw, at)[0]
        value_end = name_end + _LENGTHS.unpack_from(raw, at)[1]
        attributes[raw[at + _LENGTHS.size : name_end]] = raw[name_end:value_end]
        at = value_end
    if at != len(raw) - _CRC_BYTES:
        raise Damaged("attribute record: lengths differ")
    return AttributeRecord(InodeNo(ino), Sequence(sequence), attributes)


def counting(
    slots: Iterable[AttributeRecord | None], upto: Sequence | None
) -> AttributeRecord | None:
    """Return the record of *slots* that is valid under an identity of sequence *upto*, or None.

    Without an identity (*upto* is None) the newest is valid.
    """
    valid = [slot for slot in slots if slot and (upto is None or slot.sequence <= upto)]
    return max(valid, key=lambda slot: slot.sequence, default=None)
