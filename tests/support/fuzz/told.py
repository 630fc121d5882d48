"""What clients, operators and drives tell: hints, tenants, ranges of uids, marks of encryption."""

import contextlib
import math

from kvfs.core import records
from kvfs.core.account import NO_ENTITLEMENT, ROOT, Tenants, ranges_in
from kvfs.core.drives import DRIVES_MAX
from kvfs.core.encryption import MARK_BYTES, ephemeral_mark, parse_lock
from kvfs.core.entitlements import check_said, entitled_by, said_by
from kvfs.core.errors import Damaged, InvalidRequest
from kvfs.core.hints import DURATION_MAX_S, PRIORITY_MAX, batch_of, hint_of
from kvfs.core.types import DriveNo
from kvfs.devices.probe import read_blkid


def hint_line(data: bytes) -> None:
    """A line of the hints socket is a batch whose values are in their bounds."""
    for hint in batch_of(data).hints:
        assert 0 <= hint.priority <= PRIORITY_MAX
        assert hint.duration_s is None or 0 < hint.duration_s <= DURATION_MAX_S
        for text in (*hint.names, *hint.prefixes, *hint.sessions):
            assert isinstance(text, str)


def hint_value(data: bytes) -> None:
    """The value of ``user.kvfs.hint``."""
    with contextlib.suppress(ValueError):
        hint = hint_of(data)
        assert 0 <= hint.priority <= PRIORITY_MAX
        assert hint.ttl_s is None or 0 < hint.ttl_s <= DURATION_MAX_S
        assert hint_of(hint.text) == hint


def tenants(data: bytes) -> None:
    """Attributes that say what a tenant may store: ``NAME=VALUE``."""
    name, _, value = data.partition(b"=")
    entitled = entitled_by(NO_ENTITLEMENT, {name: value})
    assert 0 < entitled.weight < math.inf
    said = said_by(name)
    if said is not None:
        with contextlib.suppress(InvalidRequest):
            check_said(said, value)


def subuid(data: bytes) -> None:
    """The text of subuid(5): no range has root in it, and each uid has one tenant."""
    ranges = list(ranges_in(data.decode("utf-8", errors="replace"), {"alice": 1000}))
    of_uids = Tenants(ranges)
    assert of_uids[ROOT] == ROOT
    for each in ranges:
        assert 0 < each.first < each.end
        of_uids[each.first], of_uids[each.end - 1]


def mark(data: bytes) -> None:
    """The first bytes of a SOURCE; what they name is part of a path and of a command."""
    found = parse_lock(data[:MARK_BYTES])
    if found is not None:
        assert set(found.uuid) <= set("0123456789abcdef-"), found
        assert parse_lock(ephemeral_mark(found.uuid)) is not None


def blkid(data: bytes) -> None:
    """What blkid(8) says of a drive, whose label is somebody's."""
    read_blkid(data.decode("utf-8", errors="replace"))


def drive_row(data: bytes) -> None:
    """The row that counts what a drive of several holds."""
    drive = DriveNo(1 + (data[0] if data else 0) % (DRIVES_MAX - 1))
    for raw in (data[1:], records.seal(records.drive_key(drive), data[1:])):
        with contextlib.suppress(Damaged):
            count = records.parse_drive_count(drive, raw)
            assert records.parse_drive_count(drive, records.pack_drive_count(drive, count)) == count
