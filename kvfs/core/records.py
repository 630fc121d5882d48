"""Every record that kvfs keeps, packed and parsed; docs/dev/format.md is this file in prose.

Pure: bytes in, values out. A record ends in the CRC32C of everything before it, little-endian;
bytes that fail it, or that carry a version not known here, raise ``Damaged`` and never a value.
"""

import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from kvfs.core.checksum import CRC, CRC32C_RESIDUE, crc32c
from kvfs.core.errors import Damaged
from kvfs.core.lifecycle import State
from kvfs.core.types import FIRST_INODE, INODE_END, DriveNo, InodeNo, InodeRecord, Sequence

#: Version of the index's layout, kept in its meta keyspace; another one is refused at open.
INDEX_FORMAT: Final = 1
#: Version byte of an inode record, and of an identity.
INODE_RECORD_VERSION: Final = 1
IDENTITY_VERSION: Final = 1

# One prefix byte per keyspace, in an order chosen for the B-tree they share. Inodes come last: new
# ones go to its very end, where LMDB can append and leaves pages full instead of half. Counters
# lie just before the inodes, next to those of old directories, whose records a create changes too.
NAME_PREFIX: Final = b"\x01"
CHILD_PREFIX: Final = b"\x02"
XATTR_PREFIX: Final = b"\x03"
META_PREFIX: Final = b"\x04"
INODE_PREFIX: Final = b"\x05"

FORMAT_KEY: Final = META_PREFIX + b"format"
COUNTERS_KEY: Final = META_PREFIX + b"counters"
UNFINISHED_KEY: Final = META_PREFIX + b"unfinished"
RECONCILE_KEY: Final = META_PREFIX + b"reconcile"
#: The number of a drive from 1 on follows, in one byte.
DRIVE_PREFIX: Final = META_PREFIX + b"drive"
#: If more inodes than this are unfinished, none is listed, and a start looks at every inode.
UNFINISHED_MAX: Final = 256

_KEY: Final = struct.Struct(">BQ")
_CHILD_KEY: Final = struct.Struct(">BQQ")
_U64: Final = struct.Struct("<Q")
_DOUBT: Final = struct.Struct("<QQQ")
#: DriveCount's fields in their order.
_DRIVE_COUNT: Final = struct.Struct("<QQ")
#: version, name_len, InodeRecord's fields in their order up to ``sequence``, then its maker.
_INODE: Final = struct.Struct("<BxHIIIIQQqqqqQQIQIQ")
assert _INODE.size == 108
#: version, then Counters' fields in their order.
_COUNTERS: Final = struct.Struct("<B7xQQQQQQ")
assert _COUNTERS.size == 56
#: version, then Identity's fields in their order up to ``content_crc``; the CRC follows.
_IDENTITY: Final = struct.Struct("<B3xQQQIIIQqII")
assert _IDENTITY.size == 64
_FORMAT: Final = struct.Struct("<I")
#: The states that a record may have; State(number) takes ten times as long.
_STATES: Final = frozenset(map(int, State))
#: Sizes and sequence numbers have at most this many bits: kvfs adds to them and packs the sum.
_NUMBER_BITS: Final = 63
_UNLISTED: Final = b"\xff\xff\xff\xff"
#: The state alone, at its place in _INODE.
_STATE: Final = struct.Struct("<16xI")


class Counters(NamedTuple):
    """What the index holds: numbers of inodes by kind, and the space of their extents.

    ``blocks`` are regular files, ``used_bytes`` is what their extents hold on the device
    (st_blocks * 512), ``others`` counts fifos and sockets. ``sequence`` is the highest one given
    to a record so far.
    """

    blocks: int = 0
    used_bytes: int = 0
    directories: int = 0
    symlinks: int = 0
    others: int = 0
    sequence: int = 0

    @property
    def next_sequence(self) -> Sequence:
        """The next sequence number, higher than all before."""
        return Sequence(self.sequence + 1)


class DriveCount(NamedTuple):
    """What of the counters is on one drive: regular files, and what their extents hold there."""

    blocks: int = 0
    used_bytes: int = 0


class Doubt(NamedTuple):
    """Which inodes of an index that went back to a logged moment are still to be compared.

    Those from ``verified`` on and below ``below`` whose record has no higher ``sequence``.
    """

    below: InodeNo
    verified: InodeNo
    sequence: int


class Identity(NamedTuple):
    """What the xattrs of an extent, or of the identity file of a directory or symlink, say of it.

    Enough to rebuild the inode and its name without the index. If two identities have one name, the
    higher ``sequence`` wins. ``flags``: IS_SLAB, HAS_HOLES, HAS_CRC. With HAS_CRC,
    ``content_crc`` is the CRC32C of all bytes of the block.
    """

    ino: InodeNo
    parent: InodeNo
    sequence: Sequence
    mode: int
    uid: int
    gid: int
    size_bytes: int
    mtime_ns: int
    flags: int
    content_crc: int
    name: bytes


#: An identity's flags. IS_SLAB: the block was allocated ahead or rewritten in place. HAS_HOLES:
#: parts were never written before its bytes became durable, so that holes are no sign of damage.
IS_SLAB: Final = 1
HAS_HOLES: Final = 2
#: Its checksum is known.
HAS_CRC: Final = 4
#: The flags about the bytes only, which the index does not keep.
OF_BYTES: Final = HAS_HOLES | HAS_CRC

# Bound once: it saves an attribute lookup in functions that take a fraction of a microsecond.
_pack_key = _KEY.pack
_pack_child_key = _CHILD_KEY.pack
_pack_crc = CRC.pack
_pack_inode = _INODE.pack
_unpack_inode = _INODE.unpack_from
_pack_u64 = _U64.pack
_unpack_u64 = _U64.unpack_from
_new_tuple = tuple.__new__

_META: Final = META_PREFIX[0]
_NAME: Final = NAME_PREFIX[0]
_CHILD: Final = CHILD_PREFIX[0]
_XATTR: Final = XATTR_PREFIX[0]
_INO: Final = INODE_PREFIX[0]
_CRC_BYTES: Final = 4
_NAME_START: Final = _INODE.size


def inode_key(ino: InodeNo) -> bytes:
    """Return the key of *ino*'s inode record."""
    return _pack_key(_INO, ino)


def parse_inodes(
    rows: Iterable[tuple[bytes, bytes]],
) -> Iterator[tuple[InodeNo, InodeRecord | None]]:
    """Yield inode and record of each of *rows*; None as record if it is damaged."""
    for key, raw in rows:
        try:
            record = parse_inode(raw)
        except Damaged:
            record = None
        yield parse_inode_key(key), record


def name_key(parent: InodeNo, name: bytes) -> bytes:
    """Return the key under which *name* in directory *parent* is looked up."""
    return _pack_key(_NAME, parent) + name


def child_key(parent: InodeNo, ino: InodeNo) -> bytes:
    """Return the key of the readdir row of *ino* in directory *parent*."""
    return _pack_child_key(_CHILD, parent, ino)


def xattr_key(ino: InodeNo, name: bytes) -> bytes:
    """Return the key of extended attribute *name* of *ino*."""
    return _pack_key(_XATTR, ino) + name


def parse_inode_key(key: bytes) -> InodeNo:
    """Return the inode number of an inode key."""
    return InodeNo(_parse_key(key, _INO)[0])


def parse_name_key(key: bytes) -> tuple[InodeNo, bytes]:
    """Return (parent, name) of a name key."""
    parent, name = _parse_key(key, _NAME)
    return InodeNo(parent), name


def parse_child_key(key: bytes) -> tuple[InodeNo, InodeNo]:
    """Return (parent, ino) of a readdir row's key."""
    if len(key) != _CHILD_KEY.size or key[0] != _CHILD:
        raise Damaged(f"not a child key: {key.hex()}")
    _, parent, ino = _CHILD_KEY.unpack(key)
    return InodeNo(parent), InodeNo(ino)


def parse_xattr_key(key: bytes) -> tuple[InodeNo, bytes]:
    """Return (ino, name) of an extended attribute's key."""
    ino, name = _parse_key(key, _XATTR)
    return InodeNo(ino), name


def _parse_key(key: bytes, prefix: int) -> tuple[int, bytes]:
    if len(key) < _KEY.size or key[0] != prefix:
        raise Damaged(f"not a key of keyspace {prefix}: {key.hex()}")
    number: int = _KEY.unpack_from(key)[1]
    return number, key[_KEY.size :]


def pack_inode(record: InodeRecord) -> bytes:
    """Return the bytes of an inode record. Raises struct.error if a field is too large."""
    name = record[14]
    head = _pack_inode(INODE_RECORD_VERSION, len(name), *record[:14], record[16], record[17])
    body = head + name + record[15]
    return body + _pack_crc(crc32c(body))


def parse_inode(raw: bytes) -> InodeRecord:
    """Return the inode record that *raw* holds; raises Damaged."""
    if crc32c(raw) != CRC32C_RESIDUE:
        raise Damaged("inode record: checksum differs")
    # Field by field into one tuple: a starred list and InodeRecord(...) take 1.5 times as long.
    try:
        (
            version, name_len, mode, uid, gid, state, size_bytes, allocated_bytes,
            atime_ns, mtime_ns, ctime_ns, btime_ns, parent, entries, subdirs, sequence,
            maker_tgid, maker_birth,
        ) = _unpack_inode(raw)  # fmt: skip
    except struct.error:
        raise Damaged(f"inode record: {len(raw)} bytes are too few") from None
    name_end = _NAME_START + name_len
    if version != INODE_RECORD_VERSION or name_end > len(raw) - _CRC_BYTES:
        raise Damaged(f"inode record: version {version}, {len(raw)} bytes, name of {name_len}")
    # kvfs adds to these numbers and packs the sum.
    if state not in _STATES or (size_bytes | allocated_bytes | sequence) >> _NUMBER_BITS:
        raise Damaged(f"inode record: state {state}, or a size or sequence beyond 2^63")
    fields = (
        mode, uid, gid, state, size_bytes, allocated_bytes,
        atime_ns, mtime_ns, ctime_ns, btime_ns, parent, entries, subdirs, sequence,
        raw[_NAME_START:name_end], raw[name_end:-_CRC_BYTES], maker_tgid, maker_birth,
    )  # fmt: skip
    record: InodeRecord = _new_tuple(InodeRecord, fields)
    return record


def state_of_inode(raw: bytes) -> int:
    """Return the state in an inode record without checking it, for fast searches of a million.

    Raises Damaged only when *raw* is too short.
    """
    try:
        state: int = _STATE.unpack_from(raw)[0]
    except struct.error:
        raise Damaged(f"inode record: {len(raw)} bytes are too few") from None
    return state


def pack_name(key: bytes, ino: InodeNo) -> bytes:
    """Return the value of the name row *key*; its CRC covers the key too."""
    value = _pack_u64(ino)
    return value + _pack_crc(crc32c(key + value))


def parse_name(key: bytes, raw: bytes) -> InodeNo:
    """Return the inode number that name row *key* leads to; raises Damaged."""
    if crc32c(key + raw) != CRC32C_RESIDUE or len(raw) != 12:
        raise Damaged(f"name row {key.hex()}: checksum differs")
    ino: InodeNo = _unpack_u64(raw)[0]
    return ino


def seal(key: bytes, value: bytes) -> bytes:
    """Return *value* and the CRC32C of key and value: a readdir row or an extended attribute."""
    return value + _pack_crc(crc32c(key + value))


def unseal(key: bytes, raw: bytes) -> bytes:
    """Return the value that *raw*, made by ``seal``, contains; raises Damaged."""
    if crc32c(key + raw) != CRC32C_RESIDUE or len(raw) < _CRC_BYTES:
        raise Damaged(f"row {key.hex()}: checksum differs")
    return raw[:-_CRC_BYTES]


def pack_counters(counters: Counters) -> bytes:
    """Return the bytes of the counters row."""
    body = _COUNTERS.pack(1, *counters)
    return body + _pack_crc(crc32c(body))


def parse_counters(raw: bytes) -> Counters:
    """Return the counters that *raw* holds; raises Damaged."""
    if len(raw) != _COUNTERS.size + _CRC_BYTES or crc32c(raw) != CRC32C_RESIDUE or raw[0] != 1:
        raise Damaged("counters row: checksum, length or version differs")
    counters = Counters._make(_COUNTERS.unpack_from(raw)[1:])
    if max(counters) >> _NUMBER_BITS:
        raise Damaged(f"counters row: {max(counters)} is too much")
    return counters


def drive_key(drive: DriveNo) -> bytes:
    """Return the key of the row that counts what *drive*, which is not the first, holds."""
    return DRIVE_PREFIX + bytes((drive,))


def pack_drive_count(drive: DriveNo, count: DriveCount) -> bytes:
    """Return the value of that row."""
    return seal(drive_key(drive), _DRIVE_COUNT.pack(*count))


def parse_drive_count(drive: DriveNo, raw: bytes) -> DriveCount:
    """Return what *raw*, made by ``pack_drive_count``, holds; raises Damaged."""
    body = unseal(drive_key(drive), raw)
    if len(body) != _DRIVE_COUNT.size:
        raise Damaged(f"row of drive {drive}: {len(body)} bytes")
    count = DriveCount._make(_DRIVE_COUNT.unpack(body))
    if max(count) >> _NUMBER_BITS:
        raise Damaged(f"row of drive {drive}: {max(count)} is too much")
    return count


def pack_unfinished(inos: Collection[InodeNo]) -> bytes:
    """Return the value of the row that lists the drafts and the blocks being rewritten."""
    count = len(inos)
    if count > UNFINISHED_MAX:
        return seal(UNFINISHED_KEY, _UNLISTED)
    return seal(UNFINISHED_KEY, struct.pack(f"<I{count}Q", count, *inos))


def parse_unfinished(raw: bytes) -> list[InodeNo] | None:
    """Return the inodes that the row lists, None when they were too many; raises Damaged."""
    body = unseal(UNFINISHED_KEY, raw)
    if body == _UNLISTED:
        return None
    if len(body) % 8 != 4 or int.from_bytes(body[:4], "little") != len(body) // 8:
        raise Damaged(f"row of unfinished inodes: {len(body)} bytes")
    return [InodeNo(ino) for (ino,) in _U64.iter_unpack(body[4:])]


def pack_doubt(doubt: Doubt) -> bytes:
    """Return the value of the row that says which inodes are to be compared with the files."""
    return seal(RECONCILE_KEY, _DOUBT.pack(*doubt))


def parse_doubt(raw: bytes) -> Doubt:
    """Return the doubt that *raw*, made by ``pack_doubt``, holds; raises Damaged."""
    body = unseal(RECONCILE_KEY, raw)
    if len(body) != _DOUBT.size:
        raise Damaged(f"row of what is to be compared: {len(body)} bytes")
    below, verified, sequence = _DOUBT.unpack(body)
    if not FIRST_INODE <= verified <= INODE_END or (below | sequence) >> _NUMBER_BITS:
        raise Damaged(f"row of what is to be compared: {verified} of {below}, {sequence}")
    return Doubt(InodeNo(below), InodeNo(verified), sequence)


def pack_format(version: int) -> bytes:
    """Return the bytes of the format row."""
    body = _FORMAT.pack(version)
    return body + _pack_crc(crc32c(body))


def parse_format(raw: bytes) -> int:
    """Return the index format version that *raw* names; raises Damaged."""
    if len(raw) != _FORMAT.size + _CRC_BYTES or crc32c(raw) != CRC32C_RESIDUE:
        raise Damaged("format row: checksum or length differs")
    version: int = _FORMAT.unpack_from(raw)[0]
    return version


def pack_identity(identity: Identity, content: bytes = b"") -> tuple[bytes, bytes]:
    """Return the two xattr values of an identity, each at most 255 bytes.

    The first holds the fixed fields and a CRC32C over them, the name and *content*. The second is
    the raw name. *content* is the target of a symlink: the bytes of its identity file, which the
    checksum covers, too.
    """
    fixed = _IDENTITY.pack(IDENTITY_VERSION, *identity[:10])
    name = identity.name
    return fixed + _pack_crc(crc32c(content, crc32c(name, crc32c(fixed)))), name


def parse_identity(fixed: bytes, name: bytes, content: bytes = b"") -> Identity:
    """Return the identity of two xattr values and, for a symlink, its target; raises Damaged."""
    if len(fixed) != _IDENTITY.size + _CRC_BYTES:
        raise Damaged(f"identity: {len(fixed)} bytes instead of {_IDENTITY.size + _CRC_BYTES}")
    expected = _pack_crc(crc32c(content, crc32c(name, crc32c(fixed[:-_CRC_BYTES]))))
    if fixed[-_CRC_BYTES:] != expected:
        raise Damaged("identity: checksum differs")
    version, *fields = _IDENTITY.unpack_from(fixed)
    if version != IDENTITY_VERSION:
        raise Damaged(f"identity: version {version} is unknown")
    fields.append(name)
    identity = Identity._make(fields)
    if (identity.size_bytes | identity.sequence) >> _NUMBER_BITS:
        raise Damaged("identity: a size or sequence beyond 2^63")
    if b"/" in name or b"\0" in name or name in (b".", b".."):
        raise Damaged(f"identity: {name!r} is no name")
    return identity


def sequence_of_identity(fixed: bytes) -> Sequence | None:
    """Return the sequence number in an identity's fixed part, unchecked; None if that is short."""
    if len(fixed) < _IDENTITY.size:
        return None
    return Sequence(_IDENTITY.unpack_from(fixed)[3])


_VERSION: Final = 1
#: version, number of attributes, inode, sequence.
_HEAD: Final = struct.Struct("<B3xIQQ")
#: Lengths of a name and of its value.
_LENGTHS: Final = struct.Struct("<HI")


class AttributeRecord(NamedTuple):
    """The attributes (values by name) that *ino* had when its record had *sequence*.

    Its user xattrs, pin and policies, as its file keeps them. A file has up to two such records, in
    slots that are written in turn, so that one is always whole. The valid one has the highest
    sequence number that is not above that of the file's identity (docs/dev/format.md).
    """

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
