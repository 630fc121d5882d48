"""What is fuzzed: every decoder of bytes that kvfs did not make just now, with right examples.

A pool may be a copy, a drive of somebody else, or written by an attacker who computes checksums. So
each decoder gets the bytes as they are and, where a checksum guards them, once more under a right
one. It may raise what its docstring says, and nothing else.
"""

import contextlib
import functools
import json
import os
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from kvfs.client.nfs.ganesha_config import parse as parse_ganesha
from kvfs.core import log_records, records
from kvfs.core.admission import GatedLru
from kvfs.core.checksum import CRC, crc32c
from kvfs.core.directory_policy import NAMES, check_value
from kvfs.core.encryption import ephemeral_mark
from kvfs.core.errors import (
    Damaged,
    FormatUnknown,
    IndexDamaged,
    InvalidRequest,
    SourceForeign,
    UsageError,
)
from kvfs.core.pool_layout import HEAT, LOG, RUN, log_file_name, parse_file_name
from kvfs.core.settings import Settings
from kvfs.core.sizes import parse_age, parse_size
from kvfs.core.types import FIRST_INODE, DriveNo, InodeNo, InodeRecord, Sequence
from kvfs.devices.pool_files import parse_header
from kvfs.storage.heat_file import VERSION_LEARNED, HeatFile, pack_header, zero_rows
from kvfs.storage.inode_numbers import pack_end, parse_end
from kvfs.storage.lmdb_file import parse_meta
from kvfs.storage.pool_run import RunPlace, latest_places, read_pool_run, stale_drives
from kvfs.storage.row_log import logged_batches
from kvfs.storage.run_state import read_run_state
from kvfs.storage.syscalls import Syscalls
from tests.support.fuzz import left_in_memory, told

_EPOCH: Final = 7
_CRC_BYTES: Final = CRC.size


class Target(NamedTuple):
    """One decoder: *feed* raises if it does what its docstring does not say."""

    feed: Callable[[bytes], object]
    #: Right inputs, from which others are made.
    examples: tuple[bytes, ...]


def sealed(body: bytes) -> bytes:
    """Return *body* with its CRC32C behind it."""
    return body + CRC.pack(crc32c(body))


def _twice(
    decode: Callable[[bytes], object], *allowed: type[Exception]
) -> Callable[[bytes], object]:
    """Decode bytes as they are, and with a right checksum in place of their last four."""

    def feed(data: bytes) -> None:
        for raw in (data, sealed(data[:-_CRC_BYTES])):
            with contextlib.suppress(*allowed):
                decode(raw)

    return feed


def _once(
    decode: Callable[[bytes], object], *allowed: type[Exception]
) -> Callable[[bytes], object]:
    def feed(data: bytes) -> None:
        with contextlib.suppress(*allowed):
            decode(data)

    return feed


def _text(decode: Callable[[str], object]) -> Callable[[bytes], object]:
    """Decode bytes as a file of text is read: what is no UTF-8 does not come that far."""
    return lambda data: decode(data.decode("utf-8", errors="replace"))


# ---- rows of the index ----


def _inode(raw: bytes) -> None:
    """Whatever is accepted can be written again."""
    record = records.parse_inode(raw)
    assert records.parse_inode(records.pack_inode(record)) == record


def _rows(data: bytes) -> None:
    """Keys and values of the other keyspaces; the checksum of a row covers its key."""
    half = len(data) // 2
    key, value = data[:half], data[half:]
    for parse in (
        records.parse_inode_key,
        records.parse_name_key,
        records.parse_child_key,
        records.parse_xattr_key,
    ):
        with contextlib.suppress(Damaged):
            parse(key)
    for raw in (value, records.seal(key, value)):
        for unseal in (records.parse_name, records.unseal):
            with contextlib.suppress(Damaged):
                unseal(key, raw)
    with contextlib.suppress(Damaged):
        records.parse_unfinished(records.seal(records.UNFINISHED_KEY, data))
    with contextlib.suppress(Damaged):
        records.parse_doubt(records.seal(records.RECONCILE_KEY, data))


# ---- extents ----

_IDENTITY: Final = records.Identity(
    FIRST_INODE, InodeNo(1), Sequence(3), 0o100644, 0, 0, 4096, 1, 0, 0, b"name"
)


def _identity(data: bytes) -> None:
    fixed_bytes = len(records.pack_identity(_IDENTITY)[0])
    fixed, name = data[:fixed_bytes], data[fixed_bytes:]
    head = fixed[:-_CRC_BYTES]
    for whole in (fixed, head + CRC.pack(crc32c(name, crc32c(head)))):
        with contextlib.suppress(Damaged):
            found = records.parse_identity(whole, name)
            assert records.parse_identity(*records.pack_identity(found)) == found
    records.sequence_of_identity(fixed)
    parse_file_name(name.decode("latin-1"))


# ---- the index's log and copies ----


def _batch(data: bytes) -> None:
    """A batch as it is, and with its length and its checksum made right."""
    head_bytes = log_records.BATCH_HEAD_BYTES
    log_records.parse_batch(data)
    if len(data) < head_bytes:
        return
    length = struct.pack("<Q", len(data) - head_bytes)
    rest = data[8:24] + length + data[32:]
    log_records.parse_batch(b"KVLB" + CRC.pack(crc32c(rest)) + rest)


def _copy_end(data: bytes) -> None:
    for raw in (data, sealed(data[:-_CRC_BYTES])):
        log_records.copy_end_bytes(raw[-log_records.COPY_END_BYTES :])
        log_records.parse_copy_end(raw, len(raw))


# ---- files of a pool ----

_RUN: Final = {
    "boot_id": "x", "clean": True, "directory": 3, "superblock": "", "doubtful_below": 20,
    "age_base_ns": 5, "logged": 7, "index": "/dev/shm/x", "strays": False, "run": "r",
    "number": 9, "lost": [1], "stale": False,
}  # fmt: skip
_POOL: Final = {
    "format": 1, "epoch": 5, "uuid": "u", "created_ns": 1, "kvfs": "1", "capacity_bytes": None,
}  # fmt: skip
#: Of a drive that is being emptied, one of two.
_POOL_OF_TWO: Final = _POOL | {
    "format": 2, "pool": "p", "drive": 1, "drives": ["p", "u"], "draining": True,
}  # fmt: skip
#: What no server writes there: other types, and numbers at the ends of what fits.
_VALUES: Final[tuple[object, ...]] = (
    None, True, 0, -1, 1, 1 << 31, 1 << 62, 1 << 63, 1 << 64, 1 << 200, 0.5, float("inf"),
    float("nan"), "", "x", "/x", "\0", "1", "\ud800", [], [1], {}, {"": []},
)  # fmt: skip


@functools.cache
def _folder() -> Path:
    """A folder in memory for decoders that read a file."""
    return Path(tempfile.mkdtemp(prefix="kvfs-fuzz-", dir="/dev/shm"))


@functools.cache
def _folder_fd() -> int:
    (_folder() / LOG).mkdir()
    return os.open(_folder(), os.O_RDONLY | os.O_DIRECTORY)


def clear() -> None:
    """Remove what decoders read."""
    if _folder.cache_info().currsize:
        for path in sorted(_folder().rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        _folder().rmdir()


def _json(data: bytes, right: Mapping[str, object]) -> bytes:
    """Return the JSON object *right* with other values, which *data* chooses, under its keys."""
    wrong = dict(right)
    for key, chosen in zip(right, data, strict=False):
        if chosen < len(_VALUES):
            wrong[key] = _VALUES[chosen]
    return json.dumps(wrong).encode()


def _run(data: bytes) -> None:
    fd = _folder_fd()
    for raw in (data, _json(data, _RUN)):
        (_folder() / RUN).write_bytes(raw)
        read_run_state(fd, Syscalls())
        places = [RunPlace(DriveNo(drive), fd, "") for drive in range(2)]
        read_pool_run(places, Syscalls())
        assert stale_drives(places, Syscalls()) <= {0, 1}
        assert latest_places(places, Syscalls()), "some drive has the latest run"


def _pool(data: bytes) -> None:
    for raw in (data, _json(data, _POOL), _json(data, _POOL_OF_TWO)):
        with contextlib.suppress(SourceForeign, FormatUnknown):
            header = parse_header(raw, "x")
            drives = header.membership.drives
            assert drives[header.membership.drive] == header.uuid
            assert len(drives) > 1 or not header.is_draining


def _heat(data: bytes) -> None:
    """A section as it is, and with both of its checksums made right."""
    fd = _folder_fd()
    head_bytes = len(pack_header(_EPOCH, 0, 0, 0))
    head, rest = data[: head_bytes - 2 * _CRC_BYTES], data[head_bytes:]
    body = head + CRC.pack(crc32c(rest))
    for raw in (data, sealed(body) + rest):
        (_folder() / HEAT).write_bytes(raw)
        if (saved := HeatFile(fd, Syscalls(), _EPOCH).read()) is not None:
            GatedLru(1).recall(saved.learned, len(saved.rows.ino))


def _log(data: bytes) -> None:
    """A whole file of the log: what is read of it are batches in order."""
    fd = _folder_fd()
    path = _folder() / LOG / log_file_name(1)
    path.write_bytes(data)
    log_fd = os.open(LOG, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
    try:
        numbers = [batch.moment.number for batch in logged_batches(log_fd, Syscalls(), 0)]
    finally:
        os.close(log_fd)
    assert numbers == list(range(1, len(numbers) + 1))


# ---- what users write ----


def _settings(text: str) -> None:
    with contextlib.suppress(UsageError):
        Settings.from_toml(text)


def _flags(text: str) -> None:
    """``--set NAME=VALUE``."""
    name, _, value = text.partition("=")
    with contextlib.suppress(UsageError):
        Settings.from_toml("", {name: value})


def _policies(data: bytes) -> None:
    for name in NAMES:
        with contextlib.suppress(InvalidRequest):
            check_value(name, data)


def _sizes(text: str) -> None:
    for parse in (parse_size, parse_age):
        with contextlib.suppress(ValueError):
            parse(text)


# ---- right examples ----


def _examples_of_inodes() -> Iterator[bytes]:
    fields = (0o100644, 0, 0, 3, 4096, 4096, 1, 2, 3, 4, 1, 0, 0, 5, b"name", b"", 7, 8)
    yield records.pack_inode(InodeRecord._make(fields))
    yield records.pack_inode(InodeRecord._make((*fields[:15], b"target", 0, 0)))


def _examples_of_batches() -> Iterator[bytes]:
    moment = log_records.Moment(1, InodeNo(20), (InodeNo(17), InodeNo(18)))
    yield log_records.pack_batch(moment, {b"key": b"value", b"gone": None})
    yield log_records.pack_batch(moment._replace(number=2, pending=()), {})


def _examples_of_heat() -> Iterator[bytes]:
    """Without and with what a policy learned."""
    rows = zero_rows(3)
    rows.ino[:] = np.arange(17, 20, dtype=np.uint64)
    body = b"".join(column.tobytes() for column in rows)
    yield pack_header(_EPOCH, 3, 0, crc32c(body)) + body
    gate = GatedLru(3)
    gate.judge([1, 2, 3], [0, 1, 0])
    counts, tables = gate.learned()
    table = b"".join(tables)
    body += struct.pack("<QQ", len(counts), len(table)) + counts + table
    yield pack_header(_EPOCH, 3, 0, crc32c(body), VERSION_LEARNED) + body


_SETTINGS: Final = b"""capacity_bytes = "90%"
eviction = "lru"
verify = "off"
[policies."/a"]
evict = "never"
ttl = "7d"
"""
_HINTS: Final = json.dumps(
    {
        "id": 1,
        "hints": [
            {"do": "retain", "names": ["a"], "priority": 80, "duration_s": 60},
            {"do": "demote", "prefixes": ["b"], "sessions": ["s"]},
        ],
    }
).encode()
_UUID: Final = "0f3c8f64-1a8a-4f5e-9d53-6d0f8c7e2b11"
_LUKS2: Final = (
    b"LUKS\xba\xbe\x00\x02" + bytes(160) + _UUID.encode().ljust(40, b"\0") + b"kvfs-key-file"
)
_DRIVE_ROW: Final = b"\0" + records.pack_drive_count(DriveNo(1), records.DriveCount(2, 8192))[:-4]
_GANESHA: Final = b'EXPORT { Export_Id = 1; Path = "/kv"; CLIENT { Clients = *; } # x\n}\n'


def targets() -> dict[str, Target]:
    """Return all of them by name."""
    inodes, batches = tuple(_examples_of_inodes()), tuple(_examples_of_batches())
    counters = records.pack_counters(records.Counters._make(range(len(records.Counters._fields))))
    attributes = records.pack_attributes(
        records.AttributeRecord(FIRST_INODE, Sequence(3), {b"user.a": b"1", b"user.b": b""})
    )
    moment = log_records.Moment(3, InodeNo(20), (InodeNo(17),))
    copy_end = log_records.CopyEnd(0, 0, moment).pack()
    identity = b"".join(records.pack_identity(_IDENTITY))
    return {
        "inode": Target(_twice(_inode, Damaged), inodes),
        "rows": Target(_rows, (b"\x02" + bytes(8) + b"name" + b"value",)),
        "counters": Target(_twice(records.parse_counters, Damaged), (counters,)),
        "format": Target(_twice(records.parse_format, Damaged), (records.pack_format(3),)),
        "identity": Target(_identity, (identity,)),
        "attributes": Target(_twice(records.parse_attributes, Damaged), (attributes,)),
        "batch": Target(_batch, batches),
        "copy-end": Target(_copy_end, (copy_end,)),
        "log": Target(_log, (b"".join(batches),)),
        "lmdb-meta": Target(
            _once(lambda raw: parse_meta(raw, 0), IndexDamaged, FormatUnknown), (bytes(152),)
        ),
        "INODES": Target(_twice(parse_end, IndexDamaged), (pack_end(1 << 20),)),
        "POOL": Target(
            _pool,
            (json.dumps(_POOL).encode(), json.dumps(_POOL_OF_TWO).encode(), b"\xff" * 5 + b"\x01"),
        ),
        "RUN": Target(_run, (json.dumps(_RUN).encode(), b"\xff" * 8 + b"\x01")),
        "HEAT": Target(_heat, tuple(_examples_of_heat())),
        "settings": Target(_text(_settings), (_SETTINGS,)),
        "flags": Target(_text(_flags), (b"capacity_bytes=90%", b"index_log_s=2.5")),
        "policies": Target(_policies, (b"7d", b"never", b"priority=80,ttl=1h,session=s")),
        "drive-row": Target(told.drive_row, (_DRIVE_ROW,)),
        "mark": Target(told.mark, (ephemeral_mark(_UUID), _LUKS2)),
        "blkid": Target(told.blkid, (b"TYPE=xfs\nLABEL=kvfs\nUUID=0\n",)),
        "hint-line": Target(told.hint_line, (_HINTS,)),
        "hint-value": Target(told.hint_value, (b"priority=80,ttl=1h,session=s", b"once", b"none")),
        "tenants": Target(told.tenants, (b"user.kvfs.quota.1000=1GiB", b"user.kvfs.weight=2.5")),
        "subuid": Target(told.subuid, (b"alice:100000:65536\n1001:165536:65536\n",)),
        "notes": Target(left_in_memory.notes, (bytes(range(64)), b"\xff" * 40)),
        "journal": Target(left_in_memory.journal, (bytes(range(64)), b"\xff" * 40)),
        "sizes": Target(_text(_sizes), (b"1.5GiB", b"90%", b"7d")),
        "ganesha": Target(_text(parse_ganesha), (_GANESHA,)),
    }
