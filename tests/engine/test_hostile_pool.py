"""A pool that somebody made up, with checksums that are right: it ends no walk and no server.

What it says is a refusal with one line, damage with a miss, or believed and harmless. A directory
of it that leads elsewhere is not followed.
"""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from kvfs.core.checksum import CRC, crc32c
from kvfs.core.directory_policy import EVICT
from kvfs.core.errors import Damaged, IndexDamaged, SourceForeign
from kvfs.core.records import (
    Doubt,
    Identity,
    pack_counters,
    pack_doubt,
    pack_identity,
    pack_inode,
    parse_counters,
    parse_doubt,
    parse_identity,
    parse_inode,
)
from kvfs.core.types import FIRST_INODE, ROOT_INODE, InodeNo, Sequence
from kvfs.devices import destroy_source, format_source, open_source
from kvfs.devices.pool_files import parse_header
from kvfs.storage.heat_file import HeatFile, zero_rows
from kvfs.storage.index import Index
from kvfs.storage.inode_numbers import pack_end, parse_end
from kvfs.storage.syscalls import Syscalls
from tests.support.store.stores import Host, fill_pool, get, make_directory, names, put, settle

pytestmark = pytest.mark.usefixtures("caplog")

DEEP: Final = b"[" * 4000
BIG: Final = (1 << 64) - 1


# ---- walks ----


def make_circle(running: Host) -> tuple[InodeNo, InodeNo]:
    """Let directories a and a/b each stand in the other one, with a block in b; return a and b."""
    a = make_directory(running, b"a")
    b = make_directory(running, b"b", a)
    put(running.store, b, b"block", b"x" * 5000)
    settle(running.store)
    running.kill()
    with Index(str(running.index_path())) as index:
        record = index.inode(a)
        root = index.inode(ROOT_INODE)
        assert record is not None
        assert root is not None
        with index.write() as txn:
            txn.delete_name(ROOT_INODE, b"a", a)
            txn.put_inode(ROOT_INODE, root._replace(entries=root.entries - 1, subdirs=0))
            txn.put_inode(a, record._replace(parent=b))
            txn.put_name(b, b"a", a)
        index.sync()
    return a, b


def test_directories_that_lead_in_a_circle_end_no_walk(running: Host) -> None:
    """A start ran for ever, and took all memory."""
    a, b = make_circle(running)
    store = running.start()
    settle(store)
    assert store.scanned
    block = store.lookup(b, b"block")
    assert store.policy(a).evict == store.policy(b).evict == "auto"
    assert get(store, b, b"block") == b"x" * 5000
    store.rename(b, b"block", b, b"other")
    make = make_directory(running, b"c", a)
    with pytest.raises(Exception, match="into itself"):
        store.rename(a, b"c", make, b"d")
    store.unlink(b, b"other")
    assert store.files_below(a) == []
    store.describe()
    assert block not in store.records()
    running.stop()
    assert running.check(repair=True).problems
    assert running.check().problems == []
    assert names_after(running) == []


def names_after(running: Host) -> list[bytes]:
    running.start()
    found = names(running)
    running.stop()
    return found


# ---- decoders ----


def header(**changed: object) -> bytes:
    fields: dict[str, Any] = {
        "format": 1, "epoch": 1, "uuid": "u", "created_ns": 1, "kvfs": "0", "capacity_bytes": None,
    }  # fmt: skip
    return json.dumps({**fields, **changed}).encode()


@pytest.mark.parametrize(
    "raw",
    [
        header(capacity_bytes=float("inf")),
        header(capacity_bytes=float("nan")),
        header(capacity_bytes=-1),
        header(capacity_bytes=0),
        header(capacity_bytes=1e300),
        header(epoch=float("inf")),
        header(epoch=-1),
        header(epoch=1 << 64),
        header(created_ns=-float("inf")),
        DEEP,
        b'{"format": ' + DEEP,
        b"1",
        b"\xff\xfe",
        b"9" * 4000,
    ],
    ids=range(14),
)
def test_a_header_with_numbers_that_no_pool_has_is_no_header(raw: bytes) -> None:
    with pytest.raises(SourceForeign, match="POOL is not a pool's header"):
        parse_header(raw, "somewhere")


@pytest.mark.parametrize(
    "raw",
    [
        b'{"boot_id": "a", "clean": true, "doubtful_below": Infinity}',
        b'{"boot_id": "a", "clean": true, "doubtful_below": -1}',
        b'{"boot_id": "a", "clean": true, "doubtful_below": 1e300}',
        b'{"boot_id": "a", "clean": true, "doubtful_below": 18446744073709551616}',
        DEEP,
        b'{"boot_id": ' + DEEP,
        b"[]",
        b"7",
        b"\xff",
    ],
    ids=range(9),
)
def test_a_run_file_that_says_anything_counts_as_not_clean(running: Host, raw: bytes) -> None:
    store = running.store
    put(store, ROOT_INODE, b"block", b"x" * 5000)
    settle(store)
    running.stop()
    (running.path / "RUN").write_bytes(raw)
    store = running.start()
    assert get(store, ROOT_INODE, b"block") == b"x" * 5000
    running.stop()
    assert running.check().problems == []


def sealed(body: bytes) -> bytes:
    return body + CRC.pack(crc32c(body))


@pytest.mark.parametrize("end", [0, 1, FIRST_INODE - 1, BIG, BIG - (1 << 16)])
def test_inode_numbers_that_nobody_gave_out_are_damage(end: int) -> None:
    with pytest.raises(IndexDamaged):
        parse_end(pack_end(end))


def wild_records(running: Host) -> list[Callable[[], object]]:
    store = running.store
    record = store.row(put(store, ROOT_INODE, b"block", b"x"))
    assert record is not None
    identity = Identity(
        InodeNo(16), ROOT_INODE, Sequence(1), stat.S_IFREG, 0, 0, 1, 0, 0, 0, b"name"
    )
    counters = store.counters
    return [
        lambda: parse_inode(pack_inode(record._replace(state=200))),
        lambda: parse_inode(pack_inode(record._replace(size_bytes=BIG))),
        lambda: parse_inode(pack_inode(record._replace(allocated_bytes=BIG))),
        lambda: parse_inode(pack_inode(record._replace(sequence=Sequence(BIG)))),
        lambda: parse_counters(pack_counters(counters._replace(used_bytes=BIG))),
        lambda: parse_counters(pack_counters(counters._replace(sequence=BIG))),
        lambda: parse_doubt(pack_doubt(Doubt(InodeNo(20), InodeNo(0), Sequence(1)))),
        lambda: parse_doubt(pack_doubt(Doubt(InodeNo(20), InodeNo(20), Sequence(BIG)))),
        lambda: parse_identity(*pack_identity(identity._replace(sequence=Sequence(BIG)))),
        lambda: parse_identity(*pack_identity(identity._replace(name=b"../up"))),
        lambda: parse_identity(*pack_identity(identity._replace(name=b".."))),
        lambda: parse_identity(*pack_identity(identity._replace(name=b"a\0b"))),
    ]


def test_numbers_that_kvfs_cannot_add_to_and_names_that_are_none_are_damage(running: Host) -> None:
    for parse in wild_records(running):
        with pytest.raises(Damaged):
            parse()


def test_heat_with_stamps_that_no_clock_has_is_cold(running: Host) -> None:
    pool_fd = os.open(running.path, os.O_RDONLY)
    try:
        for column in ("touched", "allocated_bytes"):
            rows = zero_rows(2)
            rows.ino[1] = 16
            getattr(rows, column)[1] = BIG
            HeatFile(pool_fd, Syscalls(), 1).write(rows, 0)
            assert HeatFile(pool_fd, Syscalls(), 1).read() is None
    finally:
        os.close(pool_fd)


def test_a_policy_that_no_version_knows_sets_nothing(running: Host) -> None:
    store = running.store
    directory = make_directory(running, b"dir")
    running.kill()
    with Index(str(running.index_path())) as index:
        for value in (b"\xff", b"sometimes"):
            with index.write() as txn:
                txn.put_xattr(directory, EVICT, value)
        index.sync()
    store = running.start()
    put(store, directory, b"block", b"x")
    settle(store)
    assert store.policy(directory).evict == "auto"


def test_an_extent_with_a_number_that_nobody_gave_out_is_left_alone(running: Host) -> None:
    store = running.store
    put(store, ROOT_INODE, b"block", b"x" * 5000)
    settle(store)
    running.stop()
    (running.path / "extents" / "ff").mkdir(exist_ok=True)
    (running.path / "extents" / "ff" / ("f" * 16)).touch()
    (running.path / "INODES").unlink()
    running.check(repair=True)
    store = running.start()
    assert get(store, ROOT_INODE, b"block") == b"x" * 5000
    put(store, ROOT_INODE, b"next", b"y")


# ---- directories that lead elsewhere ----

PARTS: Final = (
    "extents", "identities", "index", "extents/07", "index/data.mdb", "index/lock.mdb",
    "strays", "quarantine", "log", "log/copy.0",
)  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("how", ["symlink", "owner"])
def test_a_part_of_the_pool_that_leads_elsewhere_is_refused(
    running: Host, part: str, how: str
) -> None:
    store = running.store
    put(store, ROOT_INODE, b"block", b"x" * 5000)
    settle(store)
    running.stop()
    path = running.path / part
    elsewhere = running.path.parent / "elsewhere"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.touch() if part.endswith(".mdb") else path.mkdir(parents=True)
    if how == "symlink":
        path.rename(elsewhere)
        path.symlink_to(elsewhere)
    else:
        os.chown(path, 1000, 1000)
    before = content_of(elsewhere)
    said = "is a symlink" if how == "symlink" else "belongs to user 1000"
    for use in (
        lambda: open_source(str(running.path)),
        lambda: destroy_source(str(running.path)),
        lambda: format_source(str(running.path), size_bytes=None, force=True, fill=fill_pool),
    ):
        with pytest.raises(SourceForeign, match=f"{part} {said}"):
            use()
    assert content_of(elsewhere) == before


def content_of(path: Path) -> list[str]:
    return sorted(map(str, path.rglob("*"))) if path.exists() else []


def test_a_directory_that_becomes_a_symlink_while_the_server_runs_is_not_followed(
    running: Host,
) -> None:
    store = running.store
    elsewhere = running.path.parent / "elsewhere"
    elsewhere.mkdir()
    extents = running.path / "extents"
    if extents.exists():
        extents.rename(f"{elsewhere}-extents")
    extents.symlink_to(elsewhere)
    for slot in range(256):
        (elsewhere / f"{slot:02x}").mkdir()

    def store_many() -> None:
        for number in range(600):
            put(store, ROOT_INODE, b"%d" % number, b"x")

    with pytest.raises(OSError, match="Not a directory"):
        store_many()
    assert not [path for path in elsewhere.rglob("*") if path.is_file()]
