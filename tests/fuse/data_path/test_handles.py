"""The table of open handles, and what a successor of the server can read in it."""

import mmap
import os
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

import pytest

from kvfs.core.errors import BadHandle
from kvfs.core.types import BackingId, InodeNo
from mount.files.handles import HandleKind, Handles
from tests.support.store.driven import Opened

ROWS_START: Final = 4096
ROW: Final = struct.Struct("<QIiIBBBBQIiIIQiIQdqq")


class Row(NamedTuple):
    """One row as mount/files/handles.py describes it."""

    ino: int
    flags: int
    backing_id: int
    generation: int
    kind: int
    served: int
    flushed: int
    fate: int
    request: int
    opens: int
    uid: int
    thread: int
    tgid: int
    birth: int
    closer: int
    closer_tgid: int
    closer_birth: int
    closed_s: float
    size_bytes: int
    mtime_ns: int


class Table:
    """A table and its memory as another process sees it."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("handles")
        self.handles = Handles(self.fd)

    def rows(self) -> list[Row]:
        """Return the rows that are in use, by another mapping of the same file."""
        with mmap.mmap(self.fd, 0, access=mmap.ACCESS_READ) as memory:
            rows = (Row(*row) for row in ROW.iter_unpack(memory[ROWS_START:]))
            return [row for row in rows if row.kind != HandleKind.FREE]


@pytest.fixture
def table() -> Iterator[Table]:
    """A fresh table."""
    made = Table()
    yield made
    del made.handles  # its mapping holds a descriptor of its own
    os.close(made.fd)


def opened(ino: int) -> Opened:
    """Return an inode as the store hands it out."""
    return Opened(InodeNo(ino))


def test_a_handle_is_in_the_shared_table_from_the_start(table: Table) -> None:
    one = table.handles.open(HandleKind.WRITER, os.O_RDWR, opened(16), BackingId(7), 22)
    (row,) = table.rows()
    assert row[:5] == (16, os.O_RDWR, 7, one.fh >> 32, HandleKind.WRITER)
    assert (row.request, row.opens, row.uid) == (22, 1, -1)
    assert table.handles.get(one.fh) is one
    assert len(table.handles) == 1


def test_a_closed_handle_leaves_the_table(table: Table) -> None:
    one = table.handles.open(HandleKind.READER, 0, opened(16))
    two = table.handles.open(HandleKind.DIRECTORY, 0, opened(17))
    assert table.handles.close(one.fh) is one
    assert [row.ino for row in table.rows()] == [17]
    assert table.handles.inodes() == {17}
    table.handles.close(two.fh)
    assert table.rows() == []


def test_opens_that_share_a_handle_are_counted_in_its_row(table: Table) -> None:
    """A successor must know how many closes are to come."""
    one = table.handles.open(HandleKind.READER, 0, opened(16))
    table.handles.share(one)
    assert [row.opens for row in table.rows()] == [2]
    assert len(table.handles) == 2
    table.handles.close(one.fh)
    assert [row.opens for row in table.rows()] == [1]
    assert table.handles.get(one.fh) is one
    table.handles.close(one.fh)
    assert table.rows() == []
    assert len(table.handles) == 0


def test_a_handle_that_is_kept_is_nobodys_until_it_is_shared_again(table: Table) -> None:
    one = table.handles.open(HandleKind.READER, 0, opened(16), BackingId(7))
    table.handles.leave(one)
    assert [(row.ino, row.backing_id, row.opens) for row in table.rows()] == [(16, 7, 0)]
    assert len(table.handles) == 0
    assert table.handles.inodes() == set()
    for closed in (table.handles.get, table.handles.close):
        with pytest.raises(BadHandle):
            closed(one.fh)
    table.handles.share(one)
    assert table.handles.get(one.fh) is one
    table.handles.leave(one)
    table.handles.forget(one)
    assert table.rows() == []
    with pytest.raises(BadHandle):
        table.handles.get(one.fh)


def test_a_closed_number_is_never_valid_again(table: Table) -> None:
    """Its slot is used again at once, under another generation."""
    seen = set()
    for _ in range(1000):
        handle = table.handles.open(HandleKind.READER, 0, opened(16))
        assert handle.fh not in seen
        seen.add(handle.fh)
        table.handles.close(handle.fh)
        with pytest.raises(BadHandle):
            table.handles.get(handle.fh)
        with pytest.raises(BadHandle):
            table.handles.close(handle.fh)
    assert len({fh & 0xFFFFFFFF for fh in seen}) == 1


@pytest.mark.parametrize("fh", [0, 1, 1 << 32, (1 << 64) - 1])
def test_a_number_never_given_out_is_no_handle(table: Table, fh: int) -> None:
    table.handles.open(HandleKind.READER, 0, opened(16))
    with pytest.raises(BadHandle):
        table.handles.get(fh)


def test_the_table_grows_and_keeps_its_rows(table: Table) -> None:
    handles = [table.handles.open(HandleKind.READER, n, opened(n)) for n in range(16, 10_016)]
    rows = table.rows()
    assert sorted(row.ino for row in rows) == list(range(16, 10_016))
    assert all(row.ino == row.flags for row in rows)
    assert len({handle.fh for handle in handles}) == 10_000
    for handle in handles:
        table.handles.close(handle.fh)
    assert table.rows() == []
    assert len(table.handles) == 0


def test_a_table_that_cannot_grow_loses_nothing(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    while True:
        before = len(table.handles)
        with monkeypatch.context() as patch:
            patch.setattr(os, "ftruncate", fail)
            try:
                table.handles.open(HandleKind.READER, 0, opened(16))
            except OSError:
                break
    assert len(table.handles) == len(table.rows()) == before
    table.handles.open(HandleKind.READER, 0, opened(17))
    assert len(table.rows()) == before + 1


def fail(*_: object) -> None:
    """Stand for a call that finds no memory."""
    raise OSError(12, "no memory")


def test_any_open_flags_can_be_recorded(table: Table) -> None:
    """libfuse's are a signed int."""
    table.handles.open(HandleKind.READER, -1, opened(16))
    assert [row.flags for row in table.rows()] == [0xFFFFFFFF]
