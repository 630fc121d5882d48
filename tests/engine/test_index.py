"""The index: what a commit shows, what an abort leaves, what survives a kill."""

import errno
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import lmdb
import pytest

from kvfs.core import records
from kvfs.core.errors import Damaged, Exists, NoSpace, ReadOnly
from kvfs.core.records import Counters
from kvfs.core.types import FIRST_INODE, ROOT_INODE, InodeNo, InodeRecord, Sequence
from kvfs.storage.index import Index
from tests.support.devices.failing_syscalls import FailingSyscalls

MIB: Final = 1 << 20
MAP_BYTES: Final = 64 * MIB
FILE: Final = InodeNo(20)


def record(name: bytes = b"block", parent: InodeNo = ROOT_INODE) -> InodeRecord:
    """Return a published block's record."""
    return InodeRecord(
        mode=0o100644, uid=1, gid=2, state=2, size_bytes=3, allocated_bytes=4096, atime_ns=4,
        mtime_ns=-5, ctime_ns=6, btime_ns=7, parent=parent, entries=0, subdirs=0,
        sequence=Sequence(8), name=name,
    )  # fmt: skip


def opened(path: Path, **options: object) -> Index:
    """Open the index in *path* with a small map and steps."""
    settings = {"map_size_bytes": MAP_BYTES, "preallocate_bytes": MIB, **options}
    return Index(str(path), **settings)  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The directory of an empty index."""
    Index.create(str(tmp_path / "index"), MAP_BYTES, preallocate_bytes=MIB)
    return tmp_path / "index"


@pytest.fixture
def index(path: Path) -> Iterator[Index]:
    with opened(path) as fresh:
        yield fresh


def test_a_new_index_is_empty(index: Index) -> None:
    assert index.counters() == Counters()
    assert index.lookup(ROOT_INODE, b"x") is None
    assert index.inode(ROOT_INODE) is None
    assert list(index.walk(records.INODE_PREFIX, 10)) == []
    assert index.children(ROOT_INODE, InodeNo(0), 10) == []
    assert index.xattr(ROOT_INODE, b"user.x") is None
    assert index.xattrs(ROOT_INODE) == []


def test_create_refuses_to_replace_an_index(path: Path) -> None:
    before = (path / "data.mdb").read_bytes()
    with pytest.raises(Exists):
        Index.create(str(path), MAP_BYTES)
    assert (path / "data.mdb").read_bytes() == before


def test_the_files_are_roots_own(path: Path) -> None:
    opened(path).close()
    assert {file.name: file.stat().st_mode & 0o777 for file in path.iterdir()} == {
        "data.mdb": 0o600,
        "lock.mdb": 0o600,
    }


def test_a_transaction_shows_all_it_wrote_and_reads_its_own_writes(index: Index) -> None:
    with index.write() as txn:
        txn.put_inode(FILE, record())
        txn.put_name(ROOT_INODE, b"block", FILE)
        txn.put_xattr(FILE, b"user.a", b"value")
        txn.put_counters(Counters(blocks=1, used_bytes=4096))
        assert txn.inode(FILE) == record()
        assert txn.lookup(ROOT_INODE, b"block") == FILE
        assert txn.xattr(FILE, b"user.a") == b"value"
        assert txn.xattr(FILE, b"user.b") is None
        assert txn.counters().blocks == 1
        assert index.inode(FILE) is None
    assert index.inode(FILE) == record()
    assert index.lookup(ROOT_INODE, b"block") == FILE
    assert index.children(ROOT_INODE, InodeNo(0), 10) == [(FILE, b"block")]
    assert index.xattr(FILE, b"user.a") == b"value"
    assert index.counters() == Counters(blocks=1, used_bytes=4096)


class Stop(Exception):
    """What a handler raises in the middle of a transaction."""


def test_an_exception_leaves_nothing_behind(index: Index) -> None:
    with pytest.raises(Stop), index.write() as txn:  # noqa: PT012
        txn.put_inode(FILE, record())
        txn.put_name(ROOT_INODE, b"block", FILE)
        raise Stop
    assert index.inode(FILE) is None
    assert index.lookup(ROOT_INODE, b"block") is None


@pytest.mark.parametrize(
    ("error_no", "raised"), [(errno.EIO, OSError), (errno.ENOSPC, NoSpace), (errno.EDQUOT, NoSpace)]
)
def test_a_failed_commit_changes_nothing(
    path: Path, error_no: int, raised: type[Exception]
) -> None:
    with opened(path, syscalls=FailingSyscalls(["commit"], 2, error_no)) as index:
        with index.write() as txn:
            txn.put_name(ROOT_INODE, b"first", FILE)
        with pytest.raises(raised), index.write() as txn:
            txn.put_name(ROOT_INODE, b"second", FILE)
        assert index.children(ROOT_INODE, InodeNo(0), 10) == [(FILE, b"first")]
        with index.write() as txn:
            txn.put_name(ROOT_INODE, b"third", InodeNo(21))
        assert index.lookup(ROOT_INODE, b"third") == 21


def test_a_transaction_inside_a_transaction_is_an_error_not_a_hang(index: Index) -> None:
    with index.write() as txn:
        txn.put_name(ROOT_INODE, b"name", FILE)
        with pytest.raises(OSError, match="inside a transaction"), index.write():
            pass
    assert index.lookup(ROOT_INODE, b"name") == FILE


def test_a_removed_name_is_gone_from_lookup_and_listing(index: Index) -> None:
    with index.write() as txn:
        txn.put_name(ROOT_INODE, b"old", FILE)
    with index.write() as txn:
        txn.delete_name(ROOT_INODE, b"old", FILE)
        txn.put_name(ROOT_INODE, b"new", FILE)
    assert index.lookup(ROOT_INODE, b"old") is None
    assert index.children(ROOT_INODE, InodeNo(0), 10) == [(FILE, b"new")]


def test_removing_what_is_not_there_is_fine(index: Index) -> None:
    with index.write() as txn:
        txn.delete_inode(FILE)
        txn.delete_name(ROOT_INODE, b"no", FILE)
        assert not txn.delete_xattr(FILE, b"user.no")
        txn.delete_xattrs(FILE)
        txn.delete_row(b"\x01no")
    assert index.inode(FILE) is None


def test_children_come_by_number_and_resume_behind_any_cookie(index: Index) -> None:
    directory, neighbour = InodeNo(300), InodeNo(301)
    inos = [InodeNo(ino) for ino in (2000, 17, 1 << 40, 255, 256, 65_536)]
    with index.write() as txn:
        for ino in inos:
            txn.put_name(directory, b"%d" % ino, ino)
            txn.put_name(neighbour, b"%d" % ino, ino)
    everything = [(ino, b"%d" % ino) for ino in sorted(inos)]
    assert index.children(directory, InodeNo(0), 100) == everything
    assert index.children(directory, InodeNo(0), 2) == everything[:2]
    assert index.children(directory, InodeNo(255), 2) == everything[2:4]
    assert index.children(directory, InodeNo(254), 1) == everything[1:2]
    assert index.children(directory, InodeNo(1 << 40), 5) == []
    assert index.children(directory, InodeNo(0), 0) == []
    assert index.children(InodeNo(299), InodeNo(0), 5) == []


def test_a_listing_stays_right_while_names_come_and_go(index: Index) -> None:
    with index.write() as txn:
        for ino in range(100, 200):
            txn.put_name(ROOT_INODE, b"%d" % ino, InodeNo(ino))
    seen: list[InodeNo] = []
    while rows := index.children(ROOT_INODE, seen[-1] if seen else InodeNo(0), 10):
        seen += [ino for ino, _ in rows]
        with index.write() as txn:
            txn.delete_name(ROOT_INODE, b"%d" % seen[-1], seen[-1])
            txn.put_name(ROOT_INODE, b"new%d" % seen[-1], InodeNo(seen[-1] - 90))
    assert seen == list(range(100, 200))


def test_who_reads_in_another_thread_keeps_no_freed_pages_from_use(index: Index) -> None:
    """A map with little room would be full, though rows only go."""
    inos = [InodeNo(FILE + number) for number in range(200)]
    for ino in inos:
        with index.write() as txn:
            txn.put_inode(ino, record())
            txn.put_xattr(ino, b"user.note", bytes(4000))
    began, ended = threading.Event(), threading.Event()

    def sweep() -> None:
        while not ended.is_set():
            assert index.knows(FILE)
            rows = next(index.walk(records.INODE_PREFIX, 50, committed=True))
            assert len(rows) == 50
            began.set()

    before_bytes = index.used_bytes()
    with ThreadPoolExecutor(1) as threads:
        looking = threads.submit(sweep)
        began.wait()
        for _ in range(10):
            for ino in inos:
                with index.write() as txn:
                    txn.put_xattr(ino, b"user.note", bytes(4000))
        ended.set()
        looking.result()
    assert index.used_bytes() - before_bytes < MIB // 4


def test_extended_attributes_belong_to_one_inode(index: Index) -> None:
    one, other = InodeNo(0x0100), InodeNo(0x0101)
    with index.write() as txn:
        for ino in (one, other):
            txn.put_xattr(ino, b"user.b", b"")
            txn.put_xattr(ino, b"user.a", b"x" * 20_000)
    assert index.xattrs(one) == [b"user.a", b"user.b"]
    assert index.xattr(one, b"user.a") == b"x" * 20_000
    assert index.xattr(one, b"user.b") == b""
    with index.write() as txn:
        assert txn.delete_xattr(other, b"user.a")
        txn.delete_xattrs(one)
    assert index.xattrs(one) == []
    assert index.xattrs(other) == [b"user.b"]


def test_inodes_are_walked_in_order_and_a_damaged_one_does_not_stop_the_walk(path: Path) -> None:
    with opened(path) as index, index.write() as txn:
        for ino in (16, 300, 17):
            txn.put_inode(InodeNo(ino), record())
    write_row(path, records.inode_key(InodeNo(17)), b"garbage")
    with opened(path) as index:
        (rows,) = index.walk(records.INODE_PREFIX, 10)
        found = list(records.parse_inodes(rows))
        assert found == [(16, record()), (17, None), (300, record())]
        behind = index.walk(records.INODE_PREFIX, 1, after=records.inode_key(InodeNo(16)))
        assert list(records.parse_inodes(next(behind))) == [(17, None)]
        with pytest.raises(Damaged):
            index.inode(InodeNo(17))
        assert index.inode_or_miss(InodeNo(17)) is None
        assert index.inode_or_miss(InodeNo(16)) == record()


def test_rows_of_one_keyspace_are_walked_from_any_key(index: Index) -> None:
    with index.write() as txn:
        for ino in range(FIRST_INODE, FIRST_INODE + 7):
            txn.put_name(ROOT_INODE, b"n%d" % ino, InodeNo(ino))
            txn.put_inode(InodeNo(ino), record())
    steps = list(index.walk(records.NAME_PREFIX, 3))
    assert [len(rows) for rows in steps] == [3, 3, 1]
    found = [key for rows in steps for key, _ in rows]
    assert next(index.walk(records.NAME_PREFIX, 9, after=found[4])) == steps[1][2:] + steps[2]
    assert [records.parse_name_key(key)[1] for key in found] == [
        b"n%d" % ino for ino in range(FIRST_INODE, FIRST_INODE + 7)
    ]


def write_row(path: Path, key: bytes, value: bytes) -> None:
    """Put raw bytes under *key*, past the index."""
    with (
        lmdb.open(str(path), map_size=MAP_BYTES, max_dbs=0) as environment,
        environment.begin(write=True) as txn,
    ):
        txn.put(key, value)


def test_every_kind_of_row_is_guarded(path: Path) -> None:
    with opened(path) as index, index.write() as txn:
        txn.put_name(ROOT_INODE, b"name", FILE)
    for key in (
        records.name_key(ROOT_INODE, b"name"),
        records.child_key(ROOT_INODE, FILE),
        records.xattr_key(FILE, b"user.a"),
        records.COUNTERS_KEY,
    ):
        write_row(path, key, b"\0" * 12)
    with opened(path) as index:
        with pytest.raises(Damaged):
            index.lookup(ROOT_INODE, b"name")
        with pytest.raises(Damaged):
            index.children(ROOT_INODE, InodeNo(0), 1)
        with pytest.raises(Damaged):
            index.xattr(FILE, b"user.a")
        with pytest.raises(Damaged):
            index.counters()
        with index.write() as txn:
            with pytest.raises(Damaged):
                txn.lookup(ROOT_INODE, b"name")
            txn.put_name(ROOT_INODE, b"name", FILE)
        assert index.lookup(ROOT_INODE, b"name") == FILE


def test_a_clean_stop_and_start_keep_everything(path: Path) -> None:
    with opened(path) as index:
        with index.write() as txn:
            txn.put_inode(FILE, record())
            txn.put_counters(Counters(blocks=9))
        index.sync()
    with opened(path) as index:
        assert index.inode(FILE) == record()
        assert index.counters() == Counters(blocks=9)


KILLED: Final = """
import os, signal, sys
from kvfs.storage.index import Index
index = Index(sys.argv[1], map_size_bytes=64 << 20, preallocate_bytes=1 << 20)
with index.write() as txn:
    txn.put_name(1, b"committed", 20)
txn = index.write().__enter__()
txn.put_name(1, b"open", 21)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_loses_no_commit_and_blocks_nobody(path: Path) -> None:
    """The page cache survives the process; so does nothing of an open transaction."""
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
        assert done.returncode == -9
    with opened(path) as index:
        assert index.children(ROOT_INODE, InodeNo(0), 10) == [(20, b"committed")]
        with index.write() as txn:
            txn.put_name(ROOT_INODE, b"next", InodeNo(22))
        assert index.lookup(ROOT_INODE, b"next") == 22


def test_a_read_only_index_reads_and_writes_nothing(path: Path) -> None:
    with opened(path) as index, index.write() as txn:
        txn.put_name(ROOT_INODE, b"name", FILE)
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.iterdir()}
    with opened(path, read_only=True) as index:
        assert index.lookup(ROOT_INODE, b"name") == FILE
        assert not index.preallocation_due()
        with pytest.raises(ReadOnly), index.write():
            pass
    assert before == {
        file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.iterdir()
    }


def test_close_twice_is_fine(path: Path) -> None:
    index = opened(path)
    index.close()
    index.close()
    with opened(path) as again:
        assert again.counters() == Counters()
