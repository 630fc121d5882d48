"""The bytes of the index's log, and what a copy of the index ends with.

docs/dev/format.md lists the fields. All numbers are little-endian.
"""

import struct
from collections.abc import Mapping
from typing import Final, NamedTuple

from kvfs.core.checksum import CRC, crc32c
from kvfs.core.types import InodeNo

#: Magic, CRC32C of all bytes behind it, number, young, bytes behind the head, pending, rows.
_BATCH: Final = struct.Struct("<4sIQQQII")
BATCH_HEAD_BYTES: Final = _BATCH.size
assert BATCH_HEAD_BYTES == 40
_BATCH_MAGIC: Final = b"KVLB"
_CRC_START: Final = 8
#: A batch that says it is longer is not one: so much is logged at once at the very most.
BATCH_MOST_BYTES: Final = 1 << 30
#: Length of the key, and of the value.
_ROW: Final = struct.Struct("<HI")
#: In place of the length of a value: the row was removed.
_GONE: Final = 0xFFFF_FFFF

#: Magic, version, CRC32C of LMDB's bytes, how many these are, number, young, pending.
_END: Final = struct.Struct("<8sIIQQQQ")
COPY_END_BYTES: Final = _END.size + CRC.size
_COPY_MAGIC: Final = b"KVFSCOPY"
_COPY_VERSION: Final = 1
_INO_BYTES: Final = 8
#: A copy with more pending inodes is not believed.
_PENDING_MAX: Final = 1 << 22


class Moment(NamedTuple):
    """A state of the index, between two of its changes.

    ``number`` is that of the last batch of the log that is in it. Inodes from ``young`` on were
    created later. ``pending`` were unfinished: drafts, blocks being rewritten, and extents that
    were ready for inodes to come.
    """

    number: int
    young: InodeNo
    pending: tuple[InodeNo, ...]


class Batch(NamedTuple):
    """Rows by key, None for one that was removed, and the moment to which they lead."""

    moment: Moment
    rows: dict[bytes, bytes | None]

    @property
    def number(self) -> int:
        """Its number in the log."""
        return self.moment.number


def pack_batch(moment: Moment, rows: Mapping[bytes, bytes | None]) -> bytes:
    """Return one batch of the log."""
    parts = [_pack_inodes(moment.pending)]
    for key, value in rows.items():
        if value is None:
            parts += (_ROW.pack(len(key), _GONE), key)
        else:
            parts += (_ROW.pack(len(key), len(value)), key, value)
    body = b"".join(parts)
    head = _BATCH.pack(
        _BATCH_MAGIC, 0, moment.number, moment.young, len(body), len(moment.pending), len(rows)
    )
    crc = crc32c(body, crc32c(head[_CRC_START:]))
    return b"".join((_BATCH_MAGIC, CRC.pack(crc), head[_CRC_START:], body))


def batch_bytes(head: bytes) -> int:
    """Return the length of the batch that begins with *head*; 0 if none begins here."""
    if len(head) < BATCH_HEAD_BYTES:
        return 0
    magic, _, _, _, body_bytes, _, _ = _BATCH.unpack_from(head)
    if magic != _BATCH_MAGIC or body_bytes > BATCH_MOST_BYTES:
        return 0
    return BATCH_HEAD_BYTES + int(body_bytes)


def parse_moment(raw: bytes) -> Moment | None:
    """Return the moment to which the batch in *raw* leads, None if the batch is not whole."""
    length_bytes = batch_bytes(raw)
    if not length_bytes or length_bytes != len(raw):
        return None
    _, crc, number, young, _, pending_count, _ = _BATCH.unpack_from(raw)
    if crc32c(memoryview(raw)[_CRC_START:]) != crc:
        return None
    try:
        return Moment(number, InodeNo(young), _parse_inodes(raw, pending_count, BATCH_HEAD_BYTES))
    except struct.error:
        return None


def parse_batch(raw: bytes) -> Batch | None:
    """Return the batch in *raw*, None if it is not whole."""
    moment = parse_moment(raw)
    if moment is None:
        return None
    *_, rows_count = _BATCH.unpack_from(raw)
    # Whoever made a pool to do harm has made a right checksum, too.
    rows: dict[bytes, bytes | None] = {}
    try:
        at = BATCH_HEAD_BYTES + len(moment.pending) * _INO_BYTES
        for _ in range(rows_count):
            key_bytes, value_bytes = _ROW.unpack_from(raw, at)
            at += _ROW.size
            key = raw[at : at + key_bytes]
            at += key_bytes
            if value_bytes == _GONE:
                rows[key] = None
            else:
                rows[key] = raw[at : at + value_bytes]
                at += value_bytes
    except struct.error:
        return None
    return Batch(moment, rows) if at == len(raw) else None


def _pack_inodes(inos: tuple[InodeNo, ...]) -> bytes:
    return struct.pack(f"<{len(inos)}Q", *inos)


def _parse_inodes(raw: bytes, count: int, at: int) -> tuple[InodeNo, ...]:
    return tuple(map(InodeNo, struct.unpack_from(f"<{count}Q", raw, at)))


class CopyEnd(NamedTuple):
    """What stands behind LMDB's bytes in a copy of the index: how many, and their CRC32C."""

    data_bytes: int
    data_crc: int
    moment: Moment

    def pack(self) -> bytes:
        """Return the bytes to append to LMDB's."""
        pending = self.moment.pending
        raw = _pack_inodes(pending) + _END.pack(
            _COPY_MAGIC,
            _COPY_VERSION,
            self.data_crc,
            self.data_bytes,
            self.moment.number,
            self.moment.young,
            len(pending),
        )
        return raw + CRC.pack(crc32c(raw))


def copy_end_bytes(tail: bytes) -> int:
    """Return how long the end of a copy is whose last COPY_END_BYTES are *tail*; 0: it has none."""
    if len(tail) != COPY_END_BYTES:
        return 0
    magic, version, _, _, _, _, count = _END.unpack_from(tail)
    if (magic, version) != (_COPY_MAGIC, _COPY_VERSION) or count > _PENDING_MAX:
        return 0
    return int(count) * _INO_BYTES + COPY_END_BYTES


def parse_copy_end(raw: bytes, copy_bytes: int) -> CopyEnd | None:
    """Return the end *raw* of a copy of *copy_bytes* in all; None if it is not whole."""
    end_bytes = copy_end_bytes(raw[-COPY_END_BYTES:])
    if not end_bytes or end_bytes != len(raw):
        return None
    if CRC.unpack(raw[-CRC.size :])[0] != crc32c(raw[: -CRC.size]):
        return None
    _, _, crc, data_bytes, number, young, count = _END.unpack_from(raw, len(raw) - COPY_END_BYTES)
    if data_bytes + len(raw) != copy_bytes:
        return None
    moment = Moment(number, InodeNo(young), _parse_inodes(raw, count, 0))
    return CopyEnd(data_bytes, crc, moment)
