"""A page of a large index that is broken is found before LMDB reads it, which may die of that."""

import os
import random
import stat
import struct
from pathlib import Path

import pytest

from kvfs.core.errors import IndexDamaged
from kvfs.core.inode_rules import blank_record
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.engine.recovery import index_before_use
from kvfs.engine.recovery.index_before_use import (
    ALL_ROWS,
    WHOLE_LOOK_MOST_BYTES,
    read_apart,
    refuse_broken,
    walk,
)
from kvfs.storage.index import Index
from kvfs.storage.index_pages import refuse_broken_pages
from kvfs.storage.lmdb_file import check_data_file, newest_trees

MIB = 1 << 20
PAGE_BYTES = 4096
NAMES = 20_000
CORRUPTIONS = 40


def fill(path: Path) -> None:
    """Fill an index with names, some long attributes, and pages that were freed."""
    draw = random.Random(1)
    sizes = {"map_size_bytes": 64 * MIB, "preallocate_bytes": MIB}
    Index.create(str(path), 64 * MIB, preallocate_bytes=MIB)
    with Index(str(path), **sizes) as index:
        for first in range(16, 16 + NAMES, 500):
            with index.write() as txn:
                for number in range(first, first + 500):
                    ino, name = InodeNo(number), b"%064x" % draw.getrandbits(200)
                    txn.put_name(ROOT_INODE, name, ino)
                    record = blank_record(ROOT_INODE, name, stat.S_IFREG | 0o644, 0, 0, 1)
                    txn.put_inode(ino, record)
                    if number % 97 == 0:
                        txn.put_xattr(ino, b"user.k", b"v" * 5000)
                    if number % 5 == 3 and number > 700:
                        txn.delete_inode(InodeNo(number - 600))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("large") / "index"
    fill(made)
    return made


def is_found(path: Path) -> bool:
    try:
        refuse_broken_pages(str(path))
    except IndexDamaged:
        return True
    return False


def death(path: Path) -> str:
    """Return which signal ends a process that reads all rows; empty if none does."""
    try:
        read_apart(lambda: walk(str(path), ALL_ROWS))
    except IndexDamaged as error:
        return str(error) if "ends in SIG" in str(error) else ""
    return ""


def test_a_sound_index_holds_together(path: Path) -> None:
    assert check_data_file(str(path)) > WHOLE_LOOK_MOST_BYTES
    refuse_broken_pages(str(path))
    empty = path.parent / "empty"
    Index.create(str(empty), 64 * MIB, preallocate_bytes=MIB)
    refuse_broken_pages(str(empty))


def test_no_reader_dies_of_a_page_that_was_not_found(path: Path) -> None:
    """Headers, tables of nodes and nodes, each with a bit, a byte, or all of it changed."""
    draw = random.Random(2)
    pages = check_data_file(str(path)) // PAGE_BYTES
    found = 0
    with (path / "data.mdb").open("r+b", buffering=0) as file:
        for _ in range(CORRUPTIONS):
            at = draw.randrange(2, pages) * PAGE_BYTES
            at += draw.choice((draw.randrange(16), draw.randrange(64), draw.randrange(PAGE_BYTES)))
            size = draw.choice((1, 1, 2, 8, 512))
            before = os.pread(file.fileno(), size, at)
            other = draw.choice((bytes(size), b"\xff" * size, draw.randbytes(size)))
            os.pwrite(file.fileno(), other, at)
            if is_found(path):
                found += 1
            else:
                assert death(path) == "", f"{size} bytes at {at}"
            os.pwrite(file.fileno(), before, at)
    assert found > CORRUPTIONS // 10
    refuse_broken_pages(str(path))


def test_a_start_refuses_it_in_one_line(path: Path) -> None:
    """The pages in the middle become zeros: LMDB would end in an assertion."""
    refuse_broken(str(path))
    with (path / "data.mdb").open("r+b", buffering=0) as file:
        middle = check_data_file(str(path)) // PAGE_BYTES // 2 * PAGE_BYTES
        before = os.pread(file.fileno(), 16 * PAGE_BYTES, middle)
        os.pwrite(file.fileno(), bytes(len(before)), middle)
        assert "ends in SIG" in death(path)
        with pytest.raises(IndexDamaged, match="a broken page"):
            refuse_broken(str(path))
        os.pwrite(file.fileno(), before, middle)


def some_node(fd: int, path: Path) -> int:
    """Return where in the file the node of a leaf is that lies first in its page."""
    *_, (_, rows) = newest_trees(str(path))
    page = rows.root
    for below in range(rows.depth - 1, -1, -1):
        raw = os.pread(fd, PAGE_BYTES, page * PAGE_BYTES)
        lower = int.from_bytes(raw[12:14], "little")
        at = min(struct.unpack_from(f"<{(lower - 16) // 2}H", raw, 16))
        if below:
            page = int.from_bytes(raw[at : at + 4], "little")
    return page * PAGE_BYTES + at


def test_a_key_that_is_longer_than_any_is_found(path: Path) -> None:
    """The node would still end within its page."""
    with (path / "data.mdb").open("r+b", buffering=0) as file:
        at = some_node(file.fileno(), path) + 6
        before = os.pread(file.fileno(), 2, at)
        os.pwrite(file.fileno(), (512).to_bytes(2, "little"), at)
        with pytest.raises(IndexDamaged, match="the length of a key"):
            refuse_broken_pages(str(path))
        os.pwrite(file.fileno(), before, at)
    refuse_broken_pages(str(path))


def test_only_of_a_small_index_each_row_is_looked_at(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_before_use, "verify_data_file", lambda _: ["looked at"])
    refuse_broken(str(path))
    monkeypatch.setattr(index_before_use, "WHOLE_LOOK_MOST_BYTES", 1 << 40)
    with pytest.raises(IndexDamaged, match="looked at"):
        refuse_broken(str(path))


def test_of_a_very_large_index_not_even_the_pages_are_looked_at(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(_path: str) -> None:
        raise IndexDamaged("looked at")

    monkeypatch.setattr(index_before_use, "refuse_broken_pages", look)
    with pytest.raises(IndexDamaged, match="looked at"):
        refuse_broken(str(path))
    monkeypatch.setattr(index_before_use, "BOUNDS_LOOK_MOST_BYTES", MIB)
    refuse_broken(str(path))


def test_what_a_reader_says_is_cut() -> None:
    """More than a pipe holds would have both wait for ever."""

    def fail() -> None:
        raise IndexDamaged("x" * 10_000)

    with pytest.raises(IndexDamaged) as said:
        read_apart(fail)
    assert str(said.value) == "x" * 4096
