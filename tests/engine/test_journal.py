"""The journal and the notes: what a server finds there that was not written by itself."""

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.core.errors import FormatUnknown
from kvfs.core.types import InodeNo
from kvfs.storage.index import Index
from kvfs.storage.journal import RESENT, Journal
from kvfs.storage.outliving import Notes
from kvfs.storage.shared_table import WORD
from kvfs.storage.syscalls import Syscalls
from tests.support.devices.failing_syscalls import FailingSyscalls

MIB: Final = 1 << 20
MAPPING: Final = mmap.mmap
CREATE: Final = (22, InodeNo(16))


@pytest.fixture
def memory() -> Iterator[int]:
    """A memfd, which outlives whoever writes to it."""
    fd = os.memfd_create("journal")
    yield fd
    os.close(fd)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """An index."""
    Index.create(str(tmp_path / "index"), preallocate_bytes=MIB)
    return tmp_path / "index"


def index_with(path: Path, journal: Journal, syscalls: Syscalls | None = None) -> Index:
    """Open it as a server does."""
    return Index(str(path), preallocate_bytes=MIB, syscalls=syscalls, journal=journal)


def put(index: Index, name: bytes, *, lasting: bool, deed: tuple[int, InodeNo] | None) -> None:
    """Give *name* to an inode."""
    with index.write(lasting=lasting) as txn:
        txn.put_name(InodeNo(1), name, InodeNo(16))
        txn.deed = deed


def killed(index: Index) -> None:
    """Leave the index as SIGKILL does: nothing waiting is committed."""
    index.forget_pending()
    index.close()


class DiesBeforeTheLength:
    """In place of the word that makes a record count: its store is the one that is not made."""

    size = WORD.size
    unpack_from = staticmethod(WORD.unpack_from)

    @staticmethod
    def pack_into(memory: mmap.mmap, offset: int, value: int) -> None:
        if value:
            raise InterruptedError
        WORD.pack_into(memory, offset, value)


def test_a_record_over_an_older_one_counts_from_its_length_on(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older one's length is not that of the new one, whose body is there already."""
    first = Journal(memory)
    first.waiting(1)
    assert first.keep({b"old": b"short"}, None)
    first.committed(2)
    monkeypatch.setattr("kvfs.storage.journal.WORD", DiesBeforeTheLength)
    with pytest.raises(InterruptedError):
        first.keep({b"new": b"longer" * 100}, None)
    monkeypatch.undo()
    first.close()
    with contextlib.closing(Journal(memory)) as second:
        assert second.waiting(2) == {}


def test_rows_that_wait_outlive_a_killed_server(memory: int, made: Path) -> None:
    first = index_with(made, Journal(memory))
    put(first, b"one", lasting=False, deed=CREATE)
    put(first, b"two", lasting=False, deed=None)
    killed(first)
    journal = Journal(memory)
    with index_with(made, journal) as second:
        assert second.lookup(InodeNo(1), b"one") == second.lookup(InodeNo(1), b"two") == 16
        assert journal.done() == {22: 16}
        second.settle()
        assert second.lookup(InodeNo(1), b"one") == 16


def test_rows_that_were_committed_are_not_put_back(memory: int, made: Path) -> None:
    """Another commit may have changed what they say."""
    first = index_with(made, Journal(memory))
    put(first, b"one", lasting=False, deed=CREATE)
    with first.write() as txn:
        txn.delete_name(InodeNo(1), b"one", InodeNo(16))
    killed(first)
    journal = Journal(memory)
    with index_with(made, journal) as second:
        assert second.lookup(InodeNo(1), b"one") is None
        assert journal.done() == {22: 16}


def test_what_waits_after_a_commit_is_found_alone(memory: int, made: Path) -> None:
    first = index_with(made, Journal(memory))
    put(first, b"one", lasting=False, deed=None)
    put(first, b"two", lasting=True, deed=(24, InodeNo(17)))
    put(first, b"three", lasting=False, deed=(26 | RESENT, InodeNo(18)))
    killed(first)
    journal = Journal(memory)
    with index_with(made, journal) as second:
        for name in (b"one", b"two", b"three"):
            assert second.lookup(InodeNo(1), name) == 16
        assert journal.done() == {24: 17, 26: 18}


def test_a_commit_that_was_announced_and_never_came_is_not_done(memory: int, made: Path) -> None:
    first = index_with(made, journal := Journal(memory))
    put(first, b"one", lasting=True, deed=CREATE)
    journal.intend((24, InodeNo(17)), first.transaction() + 1)
    killed(first)
    journal = Journal(memory)
    with index_with(made, journal):
        assert journal.done() == {22: 16}


def test_a_commit_that_fails_is_not_done_by_the_next(memory: int, made: Path) -> None:
    first = index_with(made, Journal(memory), FailingSyscalls(["commit"], 1))
    with pytest.raises(OSError, match="Input/output"):
        put(first, b"one", lasting=True, deed=CREATE)
    put(first, b"two", lasting=True, deed=None)
    killed(first)
    journal = Journal(memory)
    with index_with(made, journal):
        assert journal.done() == {}


def test_many_deeds_push_out_the_oldest(memory: int, made: Path) -> None:
    first = index_with(made, Journal(memory))
    for number in range(200):
        put(first, b"%d" % number, lasting=True, deed=(1000 + number, InodeNo(16)))
    killed(first)
    journal = Journal(memory)
    with index_with(made, journal) as second:
        done = journal.done()
        assert 1199 in done
        assert len(done) == 64
        put(second, b"next", lasting=True, deed=(5000, InodeNo(16)))
        assert {1199, 5000} <= journal.done().keys() | {5000}
        killed(second)
    with index_with(made, again := Journal(memory)):
        assert {1199, 5000} <= again.done().keys()


def test_a_full_journal_is_a_commit(memory: int, made: Path) -> None:
    with index_with(made, Journal(memory)) as index:
        before = index.transaction()
        for number in range(100):
            with index.write(lasting=False) as txn:
                txn.put_xattr(InodeNo(16), b"user.%d" % number, bytes(60_000))
        assert index.transaction() > before
        assert len(index.xattrs(InodeNo(16))) == 100


@pytest.mark.parametrize("table", [Journal, Notes])
def test_another_layout_is_refused(memory: int, table: type[Journal | Notes]) -> None:
    table(memory)
    os.pwrite(memory, b"\xff", 8)
    with pytest.raises(FormatUnknown):
        table(memory)


@given(st.lists(st.tuples(st.integers(0, 20), st.one_of(st.none(), st.binary(max_size=300)))))
def test_notes_are_what_was_put_last(changes: list[tuple[int, bytes | None]]) -> None:
    fd = os.memfd_create("notes")
    try:
        notes, expected = Notes(fd), {}
        for number, value in changes:
            key = b"k%d" % number
            if value is None:
                notes.drop(key)
                expected.pop(key, None)
            else:
                notes.put(key, (number, value))
                expected[key] = (number, value)
        again = Notes(fd)
        assert again.below(b"k") == {key[1:]: value for key, value in expected.items()}
        for value in (notes, again):
            value.close()
    finally:
        os.close(fd)


class Killed(Exception):
    """The process is killed at this store."""


class KilledAt:
    """Memory whose store number *at* (from 0) is the first that is not made, of all parts of it."""

    def __init__(self, at: int) -> None:
        self.left = at

    def store(self) -> None:
        """Count one store, which is about to be made."""
        if not self.left:
            raise Killed
        self.left -= 1


class KilledMemory:
    """In place of a mapping: what writes to it counts, and so does a word that is packed there."""

    def __init__(self, memory: mmap.mmap, killed_at: KilledAt) -> None:
        self.memory = memory
        self._killed_at = killed_at

    def __len__(self) -> int:
        return len(self.memory)

    def __setitem__(self, where: slice, data: bytes) -> None:
        self._killed_at.store()
        self.memory[where] = data

    def close(self) -> None:
        """Unmap it, which the kernel does for who is killed."""
        self.memory.close()


class KilledWord:
    """The word, in memory that may be counted."""

    size = WORD.size

    def __init__(self, killed_at: KilledAt) -> None:
        self._killed_at = killed_at

    def unpack_from(self, memory: mmap.mmap, offset: int) -> tuple[int]:
        return (WORD.unpack_from(memory, offset)[0],)

    def pack_into(self, memory: KilledMemory | mmap.mmap, offset: int, value: int) -> None:
        self._killed_at.store()
        real = memory.memory if isinstance(memory, KilledMemory) else memory
        WORD.pack_into(real, offset, value)


def steps_of_notes(notes: Notes, size_bytes: int) -> Iterator[tuple[bytes, bytes | None]]:
    """Change *notes*, and yield each change before it is made; notes are written anew between."""
    for number in range(12):
        key, value = b"k%d" % (number % 5), bytes([number]) * size_bytes
        yield key, value
        notes.put(key, value)
        if number % 4 == 3:
            yield key, None
            notes.drop(key)


@pytest.mark.parametrize("size_bytes", [3, 150_000], ids=["appended", "written anew"])
def test_a_kill_between_two_stores_leaves_the_notes_before_or_after_a_change(
    monkeypatch: pytest.MonkeyPatch, size_bytes: int
) -> None:
    """Where notes lay before, too: what is behind the last one is never taken for another."""
    for at in range(200):
        fd, killed_at = os.memfd_create("notes"), KilledAt(at)
        first = Notes(fd)
        first.put(b"k0", b"first")

        def counted(
            fileno: int, length: int, *, offset: int = 0, at: KilledAt = killed_at
        ) -> KilledMemory:
            return KilledMemory(MAPPING(fileno, length, offset=offset), at)

        before: dict[bytes, bytes] = {b"k0": b"first"}
        after, was_killed = dict(before), False
        with monkeypatch.context() as dying:
            dying.setattr("kvfs.storage.outliving.WORD", KilledWord(killed_at))
            dying.setattr("kvfs.storage.outliving.mmap.mmap", counted)
            first._memory = KilledMemory(first._memory, killed_at)  # type: ignore[assignment]
            try:
                for key, value in steps_of_notes(first, size_bytes):
                    before = dict(after)
                    after.pop(key, None)
                    after |= {} if value is None else {key: value}
            except Killed:
                was_killed = True
        found = Notes(fd)
        assert found.below(b"") in ((before, after) if was_killed else (after,))
        found.put(b"next", b"note")  # and the next server goes on behind them
        again = Notes(fd)
        assert again.below(b"") == found.below(b"")
        for notes in (first, found, again):
            notes.close()
        os.close(fd)
        if not was_killed:
            assert at > 20, "each change is at least a store"
            return
    raise AssertionError("it never came to its end")


def test_notes_end_where_a_killed_server_left_garbage(memory: int) -> None:
    """Killed inside the copying of a record, whose length was not stored: it may be any part."""
    notes = Notes(memory)
    notes.put(b"kept", b"value")
    start = notes._start + notes._at + WORD.size
    notes.close()
    os.pwrite(memory, b"\xff" * 3000, start)
    again = Notes(memory)
    assert again.below(b"") == {b"kept": b"value"}
    for number in range(20):
        again.put(b"%d" % number, bytes(number))
        found = Notes(memory)
        assert found.below(b"") == again.below(b"")
        found.close()
    again.close()


def test_notes_use_no_more_memory_than_they_need(memory: int) -> None:
    notes = Notes(memory)
    for number in range(100_000):
        notes.put(b"%d" % (number % 50), bytes(200))
    assert os.fstat(memory).st_blocks * 512 < 4 * MIB
    assert len(Notes(memory).below(b"")) == 50
