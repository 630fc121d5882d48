"""The index against dicts: any order of changes, aborts, failures and restarts."""

import errno
import shutil
import tempfile
from typing import Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from kvfs.core.errors import NoSpace
from kvfs.core.records import INODE_PREFIX, Counters, inode_key, parse_inodes
from kvfs.core.types import InodeNo, InodeRecord, Sequence
from kvfs.storage.index import Index
from kvfs.storage.index_transaction import WriteTransaction
from kvfs.storage.lmdb_file import verify_data_file
from tests.support.devices.failing_syscalls import FailingSyscalls

MAP_BYTES: Final = 64 << 20
#: Few numbers and names, so that rules meet; edges of a byte, so that keys are neighbours.
INOS: Final = st.sampled_from([1, 16, 17, 255, 256, 257, 65_536, 1 << 40]).map(InodeNo)
NAMES: Final = st.sampled_from([b"a", b"b", b"a\0", b"\xff", b"n" * 255, b"tmp.1"])
VALUES: Final = st.sampled_from([b"", b"v", b"x" * 300, b"y" * 9000])
RECORDS: Final = st.builds(
    InodeRecord,
    mode=st.just(0o100644), uid=st.just(0), gid=st.just(0), state=st.integers(0, 3),
    size_bytes=st.integers(0, 1 << 40), allocated_bytes=st.integers(0, 1 << 40),
    atime_ns=st.integers(-5, 5), mtime_ns=st.just(0), ctime_ns=st.just(0), btime_ns=st.just(0),
    parent=INOS, entries=st.just(0), subdirs=st.just(0),
    sequence=st.integers(0, 1 << 60).map(Sequence), name=NAMES, target=VALUES,
    maker_tgid=st.integers(0, 1 << 20), maker_birth=st.integers(0, 1 << 40),
)  # fmt: skip


class Model:
    """What the index should hold."""

    def __init__(self) -> None:
        self.inodes: dict[InodeNo, InodeRecord] = {}
        self.names: dict[tuple[InodeNo, bytes], InodeNo] = {}
        self.children: dict[tuple[InodeNo, InodeNo], bytes] = {}
        self.xattrs: dict[tuple[InodeNo, bytes], bytes] = {}
        self.counters = Counters()

    def copy(self) -> "Model":
        twin = Model()
        twin.inodes, twin.names = dict(self.inodes), dict(self.names)
        twin.children, twin.xattrs = dict(self.children), dict(self.xattrs)
        twin.counters = self.counters
        return twin


class IndexMachine(RuleBasedStateMachine):
    """One transaction is open at a time; ``now`` is what it sees, ``kept`` what is committed."""

    def __init__(self) -> None:
        super().__init__()
        self.path = tempfile.mkdtemp(prefix="kvfs-index-model-")
        Index.create(f"{self.path}/index", MAP_BYTES, preallocate_bytes=1 << 16)
        self.syscalls = FailingSyscalls(["commit"])
        self.kept = Model()
        self.now = Model()
        self.txn: WriteTransaction | None = None
        self.lasting = True
        self.open()

    def open(self) -> None:
        self.index = Index(
            f"{self.path}/index",
            map_size_bytes=MAP_BYTES,
            preallocate_bytes=1 << 16,
            syscalls=self.syscalls,
        )

    def teardown(self) -> None:
        self.index.close()
        problems = verify_data_file(f"{self.path}/index")
        shutil.rmtree(self.path)
        assert problems == []

    def writing(self) -> WriteTransaction:
        """Return the open transaction, begun if there is none."""
        if self.txn is None:
            self.txn = self.index.write(lasting=self.lasting).__enter__()
        return self.txn

    def settle(self, former: bytes | None) -> None:
        """Commit before a large value is replaced.

        LMDB keeps the room of a value over 2 KB when a smaller one replaces it in the very same
        transaction, which the verifier calls damage. kvfs writes no key twice in one.
        """
        if self.txn is not None and former is not None and len(former) > 2000:
            self.commit()

    @rule(ino=INOS, record=RECORDS)
    def put_inode(self, ino: InodeNo, record: InodeRecord) -> None:
        former = self.now.inodes.get(ino)
        self.settle(former and former.target)
        self.writing().put_inode(ino, record)
        self.now.inodes[ino] = record

    @rule(ino=INOS)
    def delete_inode(self, ino: InodeNo) -> None:
        self.writing().delete_inode(ino)
        self.now.inodes.pop(ino, None)

    @rule(parent=INOS, name=NAMES, ino=INOS)
    def put_name(self, parent: InodeNo, name: bytes, ino: InodeNo) -> None:
        """As the store does it: the inode's former name and the name's former inode go first."""
        txn = self.writing()
        former_name = self.now.children.get((parent, ino))
        if former_name is not None:
            self.delete_name(parent, former_name)
        self.delete_name(parent, name)
        txn.put_name(parent, name, ino)
        self.now.names[parent, name] = ino
        self.now.children[parent, ino] = name

    @rule(parent=INOS, name=NAMES)
    def delete_name(self, parent: InodeNo, name: bytes) -> None:
        ino = self.now.names.pop((parent, name), None)
        if ino is not None:
            self.writing().delete_name(parent, name, ino)
            del self.now.children[parent, ino]

    @rule(ino=INOS, name=NAMES, value=VALUES)
    def put_xattr(self, ino: InodeNo, name: bytes, value: bytes) -> None:
        self.settle(self.now.xattrs.get((ino, name)))
        self.writing().put_xattr(ino, name, value)
        self.now.xattrs[ino, name] = value

    @rule(ino=INOS, name=NAMES)
    def delete_xattr(self, ino: InodeNo, name: bytes) -> None:
        was_set = self.now.xattrs.pop((ino, name), None) is not None
        assert self.writing().delete_xattr(ino, name) == was_set

    @rule(ino=INOS)
    def delete_xattrs(self, ino: InodeNo) -> None:
        self.writing().delete_xattrs(ino)
        for key in [key for key in self.now.xattrs if key[0] == ino]:
            del self.now.xattrs[key]

    @rule(counters=st.builds(Counters, *[st.integers(0, 1 << 50)] * len(Counters._fields)))
    def put_counters(self, counters: Counters) -> None:
        self.writing().put_counters(counters)
        self.now.counters = counters

    @rule(ino=INOS, name=NAMES)
    def a_transaction_reads_its_own_writes(self, ino: InodeNo, name: bytes) -> None:
        txn = self.writing()
        assert txn.inode(ino) == self.now.inodes.get(ino)
        assert txn.lookup(ino, name) == self.now.names.get((ino, name))
        assert txn.xattr(ino, name) == self.now.xattrs.get((ino, name))
        assert txn.counters() == self.now.counters

    @precondition(lambda self: self.txn is not None)
    @rule()
    def commit(self) -> None:
        self.writing().__exit__(None, None, None)
        self.txn = None
        self.kept = self.now.copy()

    @precondition(lambda self: self.txn is not None)
    @rule()
    def abort(self) -> None:
        self.writing().__exit__(KeyError, KeyError(), None)
        self.txn = None
        self.now = self.kept.copy()

    @precondition(lambda self: self.txn is None)
    @rule(lasting=st.booleans())
    def choose(self, lasting: bool) -> None:
        """Whether the next transactions wait is nothing that a read can tell."""
        self.lasting = lasting

    @rule()
    def settle_what_waits(self) -> None:
        self.index.settle()

    @precondition(lambda self: self.txn is not None and self.lasting)
    @rule(error_no=st.sampled_from([errno.EIO, errno.ENOSPC]))
    def fail_to_commit(self, error_no: int) -> None:
        self.syscalls.fail_at, self.syscalls.error_no = self.syscalls.calls + 1, error_no
        with pytest.raises(NoSpace if error_no == errno.ENOSPC else OSError):
            self.writing().__exit__(None, None, None)
        self.txn = None
        self.now = self.kept.copy()

    @rule()
    def reopen(self) -> None:
        if self.txn is not None:
            self.abort()
        self.index.close()
        self.open()

    @rule()
    def preallocate(self) -> None:
        self.index.preallocate()

    @rule()
    def sync(self) -> None:
        if self.txn is None:
            self.index.sync()

    @rule(parent=INOS, after=INOS, limit=st.integers(0, 9))
    def list_children(self, parent: InodeNo, after: InodeNo, limit: int) -> None:
        expected = sorted(
            (ino, name)
            for (directory, ino), name in self.kept.children.items()
            if directory == parent and ino > after
        )
        assert self.index.children(parent, after, limit) == expected[:limit]

    @rule(after=INOS, limit=st.integers(1, 9))
    def walk_inodes(self, after: InodeNo, limit: int) -> None:
        expected = sorted(row for row in self.kept.inodes.items() if row[0] > after)
        walk = self.index.walk(INODE_PREFIX, limit, after=inode_key(after))
        assert list(parse_inodes(next(walk, []))) == expected[:limit]

    @rule(ino=INOS)
    def list_xattrs(self, ino: InodeNo) -> None:
        expected = sorted(name for owner, name in self.kept.xattrs if owner == ino)
        assert self.index.xattrs(ino) == expected

    @invariant()
    def outside_a_transaction_only_commits_are_seen(self) -> None:
        for ino, record in self.kept.inodes.items():
            assert self.index.inode(ino) == record
        for (parent, name), ino in self.kept.names.items():
            assert self.index.lookup(parent, name) == ino
        for (owner, name), value in self.kept.xattrs.items():
            assert self.index.xattr(owner, name) == value
        for parent, name in self.now.names:
            assert self.index.lookup(parent, name) == self.kept.names.get((parent, name))
        assert self.index.counters() == self.kept.counters


TestIndexModel = IndexMachine.TestCase
TestIndexModel.settings = settings(max_examples=150, stateful_step_count=40)
