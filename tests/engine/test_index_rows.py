"""Rows that wait for the next commit, and records that are kept parsed."""

import errno
from pathlib import Path

import pytest

from kvfs.core.errors import NoSpace
from kvfs.core.records import INODE_PREFIX, inode_key, parse_inodes
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.storage.index_transaction import PENDING_MAX, RECORDS_MAX
from tests.engine.test_index import FILE, opened, path, record
from tests.support.devices.failing_syscalls import FailingSyscalls

__all__ = ["path"]


def test_rows_that_need_not_last_are_read_at_once_and_kept_with_the_next_that_do(
    path: Path,
) -> None:
    commits = FailingSyscalls(["commit"])
    with opened(path, syscalls=commits) as index:
        with index.write(lasting=False) as txn:
            txn.put_name(ROOT_INODE, b"draft", FILE)
        assert index.lookup(ROOT_INODE, b"draft") == FILE
        assert commits.calls == 0
        with index.write() as txn:
            txn.delete_name(ROOT_INODE, b"draft", FILE)
            txn.put_name(ROOT_INODE, b"final", FILE)
        assert commits.calls == 1
        assert index.lookup(ROOT_INODE, b"draft") is None
        assert index.children(ROOT_INODE, InodeNo(0), 10) == [(FILE, b"final")]
        assert commits.calls == 1


def test_a_listing_a_settling_and_a_close_commit_what_waits(path: Path) -> None:
    commits = FailingSyscalls(["commit"])
    with opened(path, syscalls=commits) as index:
        with index.write(lasting=False) as txn:
            txn.put_xattr(FILE, b"user.a", b"1")
            txn.put_name(ROOT_INODE, b"name", FILE)
        assert index.children(ROOT_INODE, InodeNo(0), 10) == [(FILE, b"name")]
        assert commits.calls == 1
        with index.write(lasting=False) as txn:
            txn.put_xattr(FILE, b"user.b", b"2")
            txn.delete_xattrs(FILE)
        assert index.xattr(FILE, b"user.a") is index.xattr(FILE, b"user.b") is None
        index.settle()
        index.settle()
        assert commits.calls == 2
        with index.write(lasting=False) as txn:
            txn.put_name(ROOT_INODE, b"late", InodeNo(21))
    with opened(path) as index:
        assert index.xattrs(FILE) == []
        assert index.lookup(ROOT_INODE, b"late") == 21


def test_what_waits_outlives_a_commit_that_fails(path: Path) -> None:
    with opened(path, syscalls=FailingSyscalls(["commit"], 1, errno.ENOSPC)) as index:
        with index.write(lasting=False) as txn:
            txn.put_name(ROOT_INODE, b"draft", FILE)
        with pytest.raises(NoSpace), index.write() as txn:
            txn.put_name(ROOT_INODE, b"other", InodeNo(21))
        assert index.lookup(ROOT_INODE, b"draft") == FILE
        assert index.lookup(ROOT_INODE, b"other") is None
        index.settle()
    with opened(path) as index:
        assert index.lookup(ROOT_INODE, b"draft") == FILE


def test_only_so_many_rows_wait(path: Path) -> None:
    commits = FailingSyscalls(["commit"])
    with opened(path, syscalls=commits) as index:
        for number in range(PENDING_MAX):
            with index.write(lasting=False) as txn:
                txn.put_name(ROOT_INODE, b"%d" % number, InodeNo(100 + number))
    assert commits.calls == 2


def test_a_record_kept_parsed_is_what_the_index_says(path: Path) -> None:
    with opened(path, syscalls=FailingSyscalls(["commit"], 2, errno.ENOSPC)) as index:
        with index.write() as txn:
            txn.put_inode(FILE, record(b"first"))
        assert index.inode(FILE) == record(b"first")
        with pytest.raises(NoSpace), index.write() as txn:
            txn.put_inode(FILE, record(b"second"))
        assert index.inode(FILE) == record(b"first")
        txn = index.write().__enter__()
        txn.delete_inode(FILE)
        txn.__exit__(KeyError, KeyError(), None)
        assert index.inode(FILE) == record(b"first")
        with index.write() as txn:
            txn.delete_inode(FILE)
        assert index.inode(FILE) is None
        with index.write() as txn:
            for ino in (FILE, InodeNo(21)):
                txn.put_inode(ino, record(b"made and gone"))
            txn.delete_inode(FILE)
            txn.delete_row(inode_key(InodeNo(21)))
        assert index.inode(FILE) is index.inode(InodeNo(21)) is None
        for number in range(RECORDS_MAX + 10):
            with index.write(lasting=False) as txn:
                txn.put_inode(InodeNo(100 + number), record(b"%d" % number))
        assert len(index.records) <= RECORDS_MAX
        assert index.inode(InodeNo(100)) == record(b"0")


def test_what_another_thread_asks_commits_nothing_and_stays_in_no_cache(path: Path) -> None:
    commits = FailingSyscalls(["commit"])
    with opened(path, syscalls=commits) as index:
        with index.write() as txn:
            txn.put_inode(FILE, record(b"first"))
        with index.write(lasting=False) as txn:
            txn.delete_inode(FILE)
            txn.put_inode(InodeNo(21), record(b"waits"))
        (rows,) = index.walk(INODE_PREFIX, 10, committed=True)
        assert list(parse_inodes(rows)) == [(FILE, record(b"first"))]
        assert (index.knows(FILE), index.knows(InodeNo(21))) == (False, True)
        assert commits.calls == 1
        assert index.inode(FILE) is None
        (rows,) = index.walk(INODE_PREFIX, 10)
        assert list(parse_inodes(rows)) == [(InodeNo(21), record(b"waits"))]


def test_asking_whether_an_inode_is_known_reads_no_record_into_the_cache(path: Path) -> None:
    with opened(path) as index, index.write() as txn:
        txn.put_inode(FILE, record(b"first"))
    with opened(path) as index:
        assert index.knows(FILE)
        assert index.records == {}
