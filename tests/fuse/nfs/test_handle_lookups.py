"""What the kernel asks when it decodes a handle, message by message."""

import os
import stat
import struct
from collections.abc import Iterator
from errno import ENOTDIR, ESTALE
from typing import Final, NamedTuple

import pytest

from kvfs.core.types import ROOT_INODE
from mount.fuse.wire import (
    ENTRY_OUT_BYTES,
    ENTRY_OUT_HEAD,
    OPEN_IN,
    OPEN_OUT,
    READ_IN,
    RELEASE_IN,
    Opcode,
)
from mount.requests.handle_lookups import ListedNames
from tests.support.kernel.fake_kernel import FakeKernel, fake_kernel

pytestmark = pytest.mark.needs_fuse

NO_NODE: Final = (987_654, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
#: struct fuse_direntplus: a struct fuse_entry_out and a struct fuse_dirent.
DIRENT: Final = struct.Struct("<QQII")


class Row(NamedTuple):
    """One row of a listing."""

    name: bytes
    node: int
    cookie: int


class Asker:
    """Asks as the kernel does."""

    def __init__(self, kernel: FakeKernel) -> None:
        self.kernel = kernel
        kernel.init()

    def lookup(self, parent: int, name: bytes) -> int:
        """Return the node, or a negative errno."""
        reply = self.kernel.call(Opcode.LOOKUP, parent, name + b"\0")
        return reply.code or int(ENTRY_OUT_HEAD.unpack_from(reply.payload)[0])

    def mkdir(self, parent: int, name: bytes) -> int:
        """Make a directory and return its node."""
        body = struct.pack("<II", 0o755, 0) + name + b"\0"
        reply = self.kernel.call(Opcode.MKDIR, parent, body)
        assert reply.code == 0
        return int(ENTRY_OUT_HEAD.unpack_from(reply.payload)[0])

    def create(self, parent: int, name: bytes) -> tuple[int, int]:
        """Create a file and return its node and handle."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        body = struct.pack("<IIII", flags, stat.S_IFREG | 0o640, 0, 0) + name + b"\0"
        reply = self.kernel.call(Opcode.CREATE, parent, body)
        assert reply.code == 0
        node = ENTRY_OUT_HEAD.unpack_from(reply.payload)[0]
        return node, OPEN_OUT.unpack_from(reply.payload, ENTRY_OUT_BYTES)[0]

    def store(self, parent: int, name: bytes) -> int:
        """Leave a published file, empty, and return its node."""
        node, handle = self.create(parent, name)
        self.close(node, handle)
        return node

    def open(self, node: int, opcode: Opcode = Opcode.OPEN) -> int:
        """Return a handle, or a negative errno."""
        reply = self.kernel.call(opcode, node, OPEN_IN.pack(os.O_RDONLY, 0))
        return reply.code or int(OPEN_OUT.unpack(reply.payload)[0])

    def close(self, node: int, handle: int, opcode: Opcode = Opcode.RELEASE) -> None:
        """Flush and release a handle."""
        if opcode is Opcode.RELEASE:
            self.kernel.call(Opcode.FLUSH, node, struct.pack("<QIIQ", handle, 0, 0, 0))
        self.kernel.call(opcode, node, RELEASE_IN.pack(handle, 0, 0, 0))

    def rows(self, node: int, handle: int, cookie: int, room_bytes: int = 4096) -> list[Row]:
        """Return the rows of one READDIRPLUS."""
        body = READ_IN.pack(handle, cookie, room_bytes, 0, 0, 0, 0)
        left = self.kernel.call(Opcode.READDIRPLUS, node, body).payload
        found = []
        while left:
            child, after, length, _ = DIRENT.unpack_from(left, ENTRY_OUT_BYTES)
            begin = ENTRY_OUT_BYTES + DIRENT.size
            found.append(Row(left[begin:][:length], child, after))
            left = left[begin + -(-length // 8) * 8 :]
        return found

    def rest(self, node: int, handle: int, cookie: int, room_bytes: int = 4096) -> list[bytes]:
        """Return all names behind *cookie*."""
        names: list[bytes] = []
        while rows := self.rows(node, handle, cookie, room_bytes):
            names += [row.name for row in rows]
            cookie = rows[-1].cookie
        return names


@pytest.fixture(params=["true", "false"], ids=["fast", "pyfuse3"])
def asker(request: pytest.FixtureRequest) -> Iterator[Asker]:
    """A server that answers by itself, and one that leaves it to pyfuse3."""
    with fake_kernel("--set", f"fast_lane={request.param}") as kernel:
        yield Asker(kernel)


def test_a_node_is_found_by_its_number(asker: Asker) -> None:
    """[handles] A directory's parent, too; there is none above the root, and none below a file."""
    one = asker.mkdir(1, b"one")
    two = asker.mkdir(one, b"two")
    block = asker.store(two, b"block")
    for node in (1, one, two, block):
        assert asker.lookup(node, b".") == node
    assert [asker.lookup(node, b"..") for node in (two, one, 1)] == [one, 1, 1]
    assert asker.lookup(block, b"..") == -ENOTDIR
    for node in NO_NODE:
        assert asker.lookup(node, b".") == asker.lookup(node, b"..") == -ESTALE


def test_a_removed_block_is_not_found_by_its_number(asker: Asker) -> None:
    """[handles] But by an OPEN on its way, and while it is open its readers keep it."""
    gone, replaced, held = (asker.store(1, name) for name in (b"gone", b"replaced", b"held"))
    asker.store(1, b"new")
    reader = asker.open(held)
    assert reader > 0
    asker.kernel.call(Opcode.UNLINK, 1, b"gone\0")
    asker.kernel.call(Opcode.UNLINK, 1, b"held\0")
    asker.kernel.call(Opcode.RENAME, 1, struct.pack("<Q", 1) + b"new\0replaced\0")
    for node in (gone, replaced, held):
        assert asker.lookup(node, b".") == -ESTALE
    for node in (gone, replaced, held):
        late = asker.open(node)
        assert late > 0
        assert asker.lookup(node, b".") == -ESTALE
        asker.close(node, late)
    asker.close(held, reader)
    assert asker.lookup(held, b".") == -ESTALE


def test_a_removed_directory_is_not_found_by_its_number(asker: Asker) -> None:
    """[handles] Neither itself nor what was above it, be it open or not."""
    for held in (False, True):
        directory = asker.mkdir(1, b"directory")
        handle = asker.open(directory, Opcode.OPENDIR) if held else 0
        asker.kernel.call(Opcode.RMDIR, 1, b"directory\0")
        assert asker.lookup(directory, b".") == asker.lookup(directory, b"..") == -ESTALE
        if held:
            asker.close(directory, handle, Opcode.RELEASEDIR)


CHILDREN: Final = [b"%d" % number for number in range(600)]


@pytest.fixture
def parent(asker: Asker) -> int:
    """A directory with directories in it."""
    node = asker.mkdir(1, b"parent")
    for name in CHILDREN:
        asker.mkdir(node, name)
    return node


def test_who_asked_for_the_parent_gets_the_childs_row_first(asker: Asker, parent: int) -> None:
    """[handles-directory] Alone, whatever else there is; who reads on gets each name once."""
    wanted = asker.lookup(parent, b"450")
    assert asker.lookup(wanted, b"..") == parent
    handle = asker.open(parent, Opcode.OPENDIR)
    for _ in range(2):  # a rewound listing begins the same
        (first,) = asker.rows(parent, handle, 0)
        assert first[:2] == (b"450", wanted)
        listed = asker.rest(parent, handle, first.cookie, 2000)
        assert listed == [b".", b"..", *(name for name in CHILDREN if name != b"450")]
    asker.close(parent, handle, Opcode.RELEASEDIR)


@pytest.mark.parametrize("first", ["parent", "root"])
def test_the_next_listing_is_in_its_own_order_again(asker: Asker, parent: int, first: str) -> None:
    """[handles-directory] Of that thread, too; and that of another directory always is."""
    assert asker.lookup(asker.lookup(parent, b"450"), b"..") == parent
    node = parent if first == "parent" else 1
    asker.close(node, asker.open(node, Opcode.OPENDIR), Opcode.RELEASEDIR)
    for node, names in ((1, [b"parent"]), (parent, CHILDREN)):
        handle = asker.open(node, Opcode.OPENDIR)
        assert asker.rest(node, handle, 0) == [b".", b"..", *names]
        asker.close(node, handle, Opcode.RELEASEDIR)


def test_a_listing_that_is_not_read_from_its_beginning_lacks_nothing(
    asker: Asker, parent: int
) -> None:
    """[handles-directory] As an NFS server reads on, in an open of its own."""
    wanted = asker.lookup(parent, b"450")
    cookie = asker.lookup(parent, b"400")
    asker.lookup(wanted, b"..")
    handle = asker.open(parent, Opcode.OPENDIR)
    assert asker.rest(parent, handle, cookie) == CHILDREN[401:]
    assert asker.rest(parent, handle, 0) == [b".", b"..", *CHILDREN]


def test_a_child_that_moved_meanwhile_is_not_listed(asker: Asker, parent: int) -> None:
    """[handles-directory] Nor is one that was removed: then the order is the usual one."""
    for name, gone in ((b"450", False), (b"451", True)):
        child = asker.lookup(parent, name)
        asker.lookup(child, b"..")
        handle = asker.open(parent, Opcode.OPENDIR)
        if gone:
            asker.kernel.call(Opcode.RMDIR, parent, name + b"\0")
        else:
            body = struct.pack("<Q", 1) + name + b"\0" + name + b"\0"
            asker.kernel.call(Opcode.RENAME, parent, body)
        listed = asker.rest(parent, handle, 0)
        assert listed[:2] == [b".", b".."]
        assert name not in listed
        asker.close(parent, handle, Opcode.RELEASEDIR)


def test_of_what_a_thread_was_shown_a_page_is_remembered() -> None:
    shown: ListedNames[int] = ListedNames()
    shown.remember(7, ROOT_INODE, {b"%d" % number: number for number in range(300)})
    assert shown.find(7, ROOT_INODE, b"255") == 255
    assert shown.find(7, ROOT_INODE, b"256") is None
