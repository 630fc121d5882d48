"""The fast lane says what the handlers say, and lets nobody in whom they would not.

The same requests go to a server with the lane and to one without; permissions are tried by other
uids on real mounts of both kinds.
"""

import contextlib
import os
import stat
import struct
from collections.abc import Iterator
from errno import EACCES, EBADF, EINVAL, EISDIR, ENAMETOOLONG, ESTALE
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from mount.fuse.wire import (
    ATTR,
    ATTR_OUT_HEAD,
    ENTRY_OUT_BYTES,
    ENTRY_OUT_HEAD,
    OPEN_IN,
    OPEN_OUT,
    READ_IN,
    RELEASE_IN,
    Opcode,
)
from tests.fuse.conftest import NOBODY
from tests.support.clients.callers import Caller
from tests.support.kernel.calls import refused, write_file
from tests.support.kernel.fake_kernel import FakeKernel, Reply, fake_kernel
from tests.support.kernel.message_counts import mounted_with
from tests.support.mounts.mounting import Mounted

pytestmark = pytest.mark.needs_fuse

NO_INODE: Final = 987_654
CREATE_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL


class Attributes(NamedTuple):
    """struct fuse_attr without what differs from pool to pool: number and times."""

    size: int
    blocks: int
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    blksize: int
    flags: int
    timed: bool


def attributes_of(raw: bytes) -> Attributes:
    """Return struct fuse_attr; ``timed`` tells that its times are of today."""
    _, size, blocks, *times, mode, nlink, uid, gid, rdev, blksize, flags = ATTR.unpack(raw)
    timed = all(moment > 1_500_000_000 for moment in times[:3])
    return Attributes(size, blocks, mode, nlink, uid, gid, rdev, blksize, flags, timed)


class Said(NamedTuple):
    """A reply in words that two servers share."""

    code: int
    valid: tuple[int, ...] = ()
    attributes: Attributes | None = None
    open_flags: int = 0


class Server:
    """One server and what it said to the requests so far."""

    def __init__(self, kernel: FakeKernel) -> None:
        self.kernel = kernel
        self.said: list[tuple[str, Said]] = []
        kernel.init()

    def entry(self, what: str, opcode: Opcode, parent: int, body: bytes) -> tuple[int, int]:
        """Send what is answered by an entry; return its inode and, after a CREATE, its handle."""
        reply = self.kernel.call(opcode, parent, body)
        if reply.code:
            self.said.append((what, Said(reply.code)))
            return 0, 0
        ino, _, entry_s, attr_s, entry_ns, attr_ns = ENTRY_OUT_HEAD.unpack_from(reply.payload)
        attributes = attributes_of(reply.payload[ENTRY_OUT_HEAD.size : ENTRY_OUT_BYTES])
        if ino:
            self.said.append((what, Said(0, (entry_s, entry_ns, attr_s, attr_ns), attributes)))
        else:  # no such name, for so long; of attributes it has none
            self.said.append((what, Said(0, (entry_s, entry_ns))))
        handle = OPEN_OUT.unpack(reply.payload[ENTRY_OUT_BYTES:])[0] if opcode == 35 else 0
        return ino, handle

    def lookup(self, what: str, parent: int, name: bytes) -> int:
        """Look a name up and return its inode."""
        return self.entry(f"lookup {what}", Opcode.LOOKUP, parent, name + b"\0")[0]

    def create(self, parent: int, name: bytes) -> tuple[int, int]:
        """Create a file; return inode and handle."""
        body = struct.pack("<IIII", CREATE_FLAGS, stat.S_IFREG | 0o640, 0, 0) + name + b"\0"
        return self.entry("create", Opcode.CREATE, parent, body)

    def getattr(self, what: str, ino: int) -> None:
        """Ask for attributes."""
        reply = self.kernel.call(Opcode.GETATTR, ino, bytes(16))
        if reply.code:
            self.said.append((f"getattr {what}", Said(reply.code)))
            return
        valid_s, valid_ns, _ = ATTR_OUT_HEAD.unpack_from(reply.payload)
        attributes = attributes_of(reply.payload[ATTR_OUT_HEAD.size :])
        self.said.append((f"getattr {what}", Said(0, (valid_s, valid_ns), attributes)))

    def open(self, what: str, ino: int, flags: int) -> int:
        """Open a file; return the handle."""
        reply = self.kernel.call(Opcode.OPEN, ino, OPEN_IN.pack(flags, 0))
        if reply.code:
            self.said.append((f"open {what}", Said(reply.code)))
            return 0
        handle, open_flags, backing_id = OPEN_OUT.unpack(reply.payload)
        assert backing_id == 0
        self.said.append((f"open {what}", Said(0, open_flags=open_flags)))
        return int(handle)

    def plain(self, what: str, opcode: Opcode, ino: int, body: bytes) -> Reply:
        """Send what is answered by a code."""
        reply = self.kernel.call(opcode, ino, body)
        self.said.append((what, Said(reply.code)))
        return reply

    def release(self, what: str, ino: int, handle: int) -> None:
        """Flush and release a handle."""
        self.plain(f"flush {what}", Opcode.FLUSH, ino, struct.pack("<QIIQ", handle, 0, 0, 0))
        self.plain(f"release {what}", Opcode.RELEASE, ino, RELEASE_IN.pack(handle, 0, 0, 0))


def life_of_a_block(server: Server) -> None:
    """From its draft to its end, with a look at every station."""
    directory, _ = server.entry(
        "mkdir", Opcode.MKDIR, 1, struct.pack("<II", 0o2751, 0) + b"directory\0"
    )
    server.lookup("absent", directory, b"block")
    ino, writer = server.create(directory, b"block")
    server.lookup("empty draft", directory, b"block")
    server.getattr("empty draft", ino)
    reader = server.open("draft to read", ino, os.O_RDONLY)
    body = struct.pack("<QQIIQII", writer, 0, 5000, 0, 0, 0, 0) + bytes(range(250)) * 20
    server.plain("write", Opcode.WRITE, ino, body)
    server.getattr("written draft", ino)
    server.release("reader", ino, reader)
    server.release("writer", ino, writer)
    server.lookup("published", directory, b"block")
    server.getattr("published", ino)
    server.getattr("directory", directory)
    reader = server.open("published", ino, os.O_RDONLY)
    server.open("published again", ino, os.O_RDONLY | os.O_NONBLOCK)
    server.getattr("published, open", ino)
    server.plain("unlink", Opcode.UNLINK, directory, b"block\0")
    server.lookup("removed", directory, b"block")
    server.getattr("removed, open", ino)
    server.release("removed", ino, reader)
    server.plain("rmdir", Opcode.RMDIR, 1, b"directory\0")
    server.getattr("removed directory", directory)


def odd_questions(server: Server) -> None:
    """What is no file, no name, no handle."""
    link, _ = server.entry("symlink", Opcode.SYMLINK, 1, b"link\0target\0")
    mode = struct.pack("<IIII", stat.S_IFIFO | 0o600, 0, 0, 0)
    fifo, _ = server.entry("mkfifo", Opcode.MKNOD, 1, mode + b"fifo\0")
    for ino, what in ((1, "root"), (link, "symlink"), (fifo, "fifo"), (NO_INODE, "nothing")):
        server.getattr(what, ino)
        server.open(what, ino, os.O_RDONLY)
        for name in (b".", b"..", b"absent", b"n" * 255, b"n" * 256, b""):
            server.lookup(f"{name[:8]!r} in {what}", ino, name)
    server.lookup("symlink", 1, b"link")
    server.lookup("fifo", 1, b"fifo")
    for handle in (0, 1 << 40):
        server.release(f"no handle {handle}", 1, handle)


@pytest.mark.parametrize("requests", [life_of_a_block, odd_questions])
def test_lane_and_handlers_say_the_same(requests: object) -> None:
    """Codes, attributes, timeouts and open flags."""
    assert callable(requests)
    with contextlib.ExitStack() as stack:
        sides = []
        for lane in ("true", "false"):
            kernel = stack.enter_context(fake_kernel("--set", f"fast_lane={lane}"))
            sides.append(Server(kernel))
            requests(sides[-1])
        with_lane, without = sides
        assert len(with_lane.said) > 20
        for mine, theirs in zip(with_lane.said, without.said, strict=True):
            assert mine == theirs
        assert with_lane.kernel.status()["requests_fast_path"]["GETATTR"] >= 4
        assert "GETATTR" not in without.kernel.status()["requests_fast_path"]


def test_odd_questions_have_the_right_errors() -> None:
    """So that the two do not agree on something wrong."""
    with fake_kernel() as kernel:
        server = Server(kernel)
        odd_questions(server)
        codes = {what: said.code for what, said in server.said}
    assert codes["open root"] == -EISDIR
    assert codes["open symlink"] == codes["open fifo"] == -EINVAL
    assert codes["open nothing"] == codes["getattr nothing"] == -ESTALE
    assert codes["lookup b'nnnnnnnn' in root"] == -ENAMETOOLONG
    assert codes["lookup b'absent' in root"] == codes["lookup b'..' in root"] == 0
    assert codes["release no handle 0"] == -EBADF


def directory_entries(kernel: FakeKernel, ino: int) -> dict[bytes, tuple[int, int, int, int]]:
    """List a directory with attributes; return inode, generation and attr_valid (s, ns) by name."""
    opened = kernel.call(Opcode.OPENDIR, ino, OPEN_IN.pack(0, 0))
    handle = OPEN_OUT.unpack(opened.payload)[0]
    found, cookie = {}, 0
    while left := kernel.call(
        Opcode.READDIRPLUS, ino, READ_IN.pack(handle, cookie, 4096, 0, 0, 0, 0)
    ).payload:
        while left:
            child, generation, _, attr_s, _, attr_ns = ENTRY_OUT_HEAD.unpack_from(left)
            cookie, length = struct.unpack_from("<QI", left, ENTRY_OUT_BYTES + 8)
            name = left[ENTRY_OUT_BYTES + 24 :][:length]
            found[name] = (child, generation, attr_s, attr_ns)
            left = left[ENTRY_OUT_BYTES + 24 + -(-length // 8) * 8 :]
    kernel.call(Opcode.RELEASEDIR, ino, RELEASE_IN.pack(handle, 0, 0, 0))
    return found


@pytest.mark.parametrize("lane", ["true", "false"])
def test_attributes_are_not_kept_while_somebody_writes(lane: str) -> None:
    """[stat] Its bytes go past the kernel's inode: a draft's as those of a block that was whole."""
    with fake_kernel("--set", f"fast_lane={lane}") as kernel:
        server = Server(kernel)
        directory, _ = server.entry(
            "mkdir", Opcode.MKDIR, 1, struct.pack("<II", 0o755, 0) + b"directory\0"
        )
        ino, writer = server.create(directory, b"block")

        def kept() -> list[bool]:
            server.said.clear()
            server.lookup("", directory, b"block")
            server.getattr("", ino)
            (_, (*_, looked_s, looked_ns), _, _), (_, got, _, _) = (said for _, said in server.said)
            *_, listed_s, listed_ns = directory_entries(kernel, directory)[b"block"]
            times = ((looked_s, looked_ns), got, (listed_s, listed_ns))
            return [time > (0, 0) for time in times]

        assert kept() == [False] * 3, "a draft"
        server.release("draft", ino, writer)
        assert kept() == [True] * 3
        for flags in (os.O_WRONLY, os.O_WRONLY | os.O_APPEND, os.O_RDWR):
            again = server.open("block to write", ino, flags)
            assert kept() == [False] * 3, f"open with {flags:#x}"
            server.release("block", ino, again)
            assert kept() == [True] * 3


@pytest.mark.parametrize("lane", ["true", "false"])
def test_attributes_of_what_only_a_server_writes_are_kept_for_a_second(lane: str) -> None:
    """[stat] It writes by write(2), which the kernel sees. Not if anybody else writes, too."""
    name = Path("/proc/self/comm").read_text().strip()
    with fake_kernel("--set", f"fast_lane={lane}", "--set", f"file_servers={name}") as kernel:
        server = Server(kernel)
        ino, writer = server.create(1, b"block")

        def kept(sender: int) -> tuple[int, ...]:
            kernel.sender = sender
            server.said.clear()
            server.getattr("", ino)
            return server.said[0][1].valid

        own = kernel.sender
        assert kept(own) == (1, 0)
        kernel.sender = 0  # of another pid namespace
        other = server.open("by another", ino, os.O_WRONLY)
        assert kept(0) == kept(own) == (0, 0)
        server.release("by another", ino, other)
        server.release("draft", ino, writer)


@pytest.mark.parametrize("lane", ["true", "false"])
def test_the_roots_generation_is_0_and_each_other_inode_has_its_own(lane: str) -> None:
    """The kernel warns of any other for the root, which NFS asks for by ".." (fuse_lookup_name)."""
    with fake_kernel("--set", f"fast_lane={lane}") as kernel:
        server = Server(kernel)
        made = kernel.call(Opcode.MKDIR, 1, struct.pack("<II", 0o755, 0) + b"a\0")
        directory, generation, *_ = ENTRY_OUT_HEAD.unpack_from(made.payload)
        assert generation != 0
        for parent, name, wanted in ((directory, b"..", 0), (1, b".", 0), (1, b"a", generation)):
            reply = kernel.call(Opcode.LOOKUP, parent, name + b"\0")
            ino, told, *_ = ENTRY_OUT_HEAD.unpack_from(reply.payload)
            assert (ino, told) == (directory if wanted else 1, wanted)
        ino, _ = server.create(1, b"draft")
        listed = directory_entries(kernel, 1)
        assert listed[b"a"][:2] == (directory, generation)
        drafts = listed[b"draft"][1]
        assert (listed[b"draft"][0], 0 in (drafts, generation)) == (ino, False)
        body = struct.pack("<IIII", CREATE_FLAGS, stat.S_IFREG | 0o640, 0, 0) + b"block\0"
        made = kernel.call(Opcode.CREATE, 1, body)
        assert len({ENTRY_OUT_HEAD.unpack_from(made.payload)[1], drafts, generation}) == 3
    with fake_kernel("--set", f"fast_lane={lane}") as other:
        server = Server(other)
        made = other.call(Opcode.MKDIR, 1, struct.pack("<II", 0o755, 0) + b"a\0")
        assert ENTRY_OUT_HEAD.unpack_from(made.payload)[1] != generation, "another pool's"


# ---- permissions: the kernel asks before it sends an OPEN (default_permissions) ----


@pytest.fixture(scope="module", params=[True, False], ids=["lane", "no-lane"])
def kv(request: pytest.FixtureRequest) -> Iterator[Path]:
    """The root of a mount with or without the lane, open to all."""
    with mounted_with({"fast_lane": request.param}, "-o", "mode=0777") as mount:
        assert_lane(mount, on=request.param)
        yield mount.path


def assert_lane(mount: Mounted, *, on: bool) -> None:
    """Assert that the lane works, or that it does not."""
    os.stat(mount.path / ".")
    write_file(mount.path / "probe", b"")
    os.close(os.open(mount.path / "probe", os.O_RDONLY))
    assert ("OPEN" in mount.status()["requests_fast_path"]) == on


@pytest.fixture(scope="module")
def nobody() -> Iterator[Caller]:
    """A process without any privilege."""
    with Caller(NOBODY, NOBODY) as caller:
        yield caller


def secret(path: Path, mode: int) -> str:
    """Store a block of root's with *mode*, warm in the kernel and in the server."""
    write_file(path, b"secret")
    os.chmod(path, mode)
    with open(path, "rb") as file:
        assert file.read() == b"secret"
    return str(path)


def test_a_closed_file_is_closed_to_others(kv: Path, nobody: Caller) -> None:
    """However often it was opened by those who may; its attributes are no secret."""
    path = secret(kv / "closed", 0o600)
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_DIRECT):
        with refused(EACCES):
            nobody.os("open", path, flags)
    assert nobody.os("stat", path).st_size == 6
    assert not nobody.os("access", path, os.R_OK)
    assert nobody.os("access", path, os.F_OK)


def test_a_file_to_read_is_not_to_write(kv: Path, nobody: Caller) -> None:
    path = secret(kv / "readable", 0o644)
    nobody.os("close", nobody.os("open", path, os.O_RDONLY))
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC):
        with refused(EACCES):
            nobody.os("open", path, flags)
    assert Path(path).read_bytes() == b"secret"


def test_a_closed_directory_hides_all_below(kv: Path, nobody: Caller) -> None:
    """Neither a name that the kernel knows nor one that it does not is told."""
    (kv / "private").mkdir(mode=0o700)
    path = secret(kv / "private" / "file", 0o666)
    for name in (path, str(kv / "private" / "absent")):
        for call, *args in (("stat",), ("open", os.O_RDONLY), ("listdir",)):
            with refused(EACCES):
                nobody.os(call, name, *args)
        assert not nobody.os("access", name, os.F_OK)
    with refused(EACCES):
        nobody.os("listdir", str(kv / "private"))


def test_rights_follow_a_change_at_once(kv: Path, nobody: Caller) -> None:
    """Of mode and of owner, with everything cached before."""
    path = secret(kv / "changing", 0o644)
    for mode, allowed in ((0o600, False), (0o604, True), (0o640, False)):
        os.chmod(path, mode)
        if allowed:
            nobody.os("close", nobody.os("open", path, os.O_RDONLY))
        else:
            with refused(EACCES):
                nobody.os("open", path, os.O_RDONLY)
    os.chown(path, NOBODY, NOBODY)
    nobody.os("close", nobody.os("open", path, os.O_RDONLY))


def test_a_file_by_handle_needs_the_same_rights(kv: Path, nobody: Caller) -> None:
    """A descriptor opened by another is as good as its own rights: fchdir, then openat."""
    (kv / "shelf").mkdir(mode=0o711)
    secret(kv / "shelf" / "open", 0o604)
    secret(kv / "shelf" / "shut", 0o600)
    nobody.os("chdir", str(kv / "shelf"))
    try:
        nobody.os("close", nobody.os("open", "open", os.O_RDONLY))
        with refused(EACCES):
            nobody.os("open", "shut", os.O_RDONLY)
        with refused(EACCES):
            nobody.os("listdir", ".")
    finally:
        nobody.os("chdir", "/")
