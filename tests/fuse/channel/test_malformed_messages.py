"""Whatever the kernel may say, it gets exactly one answer, and the server lives on.

A caller in the kernel waits for ever for an answer that does not come.
"""

import contextlib
import errno
import os
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mount.fuse.libfuse_pair import REQUEST_SHAPES
from mount.fuse.wire import ENTRY_OUT_BYTES, OPEN_IN, OPEN_OUT, UNANSWERED, Opcode
from tests.support.kernel.fake_kernel import FakeKernel, Reply, fake_kernel

pytestmark = pytest.mark.needs_fuse

#: Of one session, at its begin and its end; answered, but nothing works after them.
BRACKETS = (Opcode.INIT, Opcode.DESTROY)
ASKING = sorted(set(Opcode) - UNANSWERED - set(BRACKETS))
#: Stands for the number of a handle that is open.
LIVE = -1
INTERESTING = (0, 1, 2, 16, 17, 4096, 1 << 20, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1)


class Fuzzed:
    """A server with a file and open handles; a fresh one when the last was killed by a message."""

    def __init__(self, *flags: str) -> None:
        self._flags = flags
        self._stack = contextlib.ExitStack()
        self._kernel: FakeKernel | None = None
        self.handles: list[int] = []
        self.inodes: list[int] = []

    def kernel(self) -> FakeKernel:
        """Return a living connection."""
        if self._kernel is None or self._kernel.server.poll() is not None:
            self._stack.close()
            self._kernel = self._stack.enter_context(fake_kernel(*self._flags))
            self._kernel.init()
            self.inodes = [1, 999]
            self.handles = []
            self._fill(self._kernel)
        return self._kernel

    def _fill(self, kernel: FakeKernel) -> None:
        made = kernel.call(Opcode.MKDIR, 1, struct.pack("<II", 0o755, 0) + b"d\0")
        self.inodes.append(nodeid_of(made))
        created = kernel.call(
            Opcode.CREATE, 1, struct.pack("<IIII", os.O_RDWR | os.O_CREAT, 0o100644, 0, 0) + b"f\0"
        )
        self.inodes.append(nodeid_of(created))
        self.handles.append(handle_of(created))
        self.handles.append(handle_of(kernel.call(Opcode.OPENDIR, 1, bytes(8))))
        opened = kernel.call(Opcode.OPEN, self.inodes[-1], OPEN_IN.pack(os.O_RDONLY, 0))
        self.handles.append(handle_of(opened))

    def close(self) -> None:
        """End the server."""
        self._stack.close()


def nodeid_of(reply: Reply) -> int:
    """Return the inode that an entry reply names."""
    assert reply.code == 0
    return int(struct.unpack_from("<Q", reply.payload)[0])


def handle_of(reply: Reply) -> int:
    """Return the handle that ends an OPEN, OPENDIR or CREATE reply."""
    assert reply.code == 0
    assert len(reply.payload) in (OPEN_OUT.size, ENTRY_OUT_BYTES + OPEN_OUT.size)
    return int(OPEN_OUT.unpack(reply.payload[-OPEN_OUT.size :])[0])


def assert_deliverable(reply: Reply, unique: int) -> None:
    """Assert what fuse_dev_do_write (fs/fuse/dev.c) wants of a reply; else the caller hangs."""
    assert reply.unique == unique
    assert reply.length_bytes == 16 + len(reply.payload)
    assert -512 < reply.code <= 0
    assert reply.code == 0 or not reply.payload


def assert_alive(kernel: FakeKernel) -> None:
    """Assert that nothing is left over and the next request is served."""
    reply = kernel.call(Opcode.GETATTR, 1, bytes(16))
    assert reply.code == 0
    assert not kernel.has_reply()


@pytest.fixture(scope="module", params=["true", "false"], ids=["lane", "no-lane"])
def fuzzed(request: pytest.FixtureRequest) -> Iterator[Fuzzed]:
    """A server on a small pool, so that a huge FALLOCATE is refused before it fills the memory."""
    made = Fuzzed("--capacity", "64M", "--set", f"fast_lane={request.param}")
    try:
        made.kernel()
        yield made
    finally:
        made.close()


words = st.sampled_from([LIVE, *INTERESTING]) | st.integers(0, (1 << 64) - 1)
names = st.sampled_from([b"", b".", b"..", b"f", b"d", b"n" * 255, b"n" * 256, b"user.x"])
texts = st.binary(max_size=300) | names


@st.composite
def bodies(draw: st.DrawFn, opcode: int) -> tuple[list[int], bytes, int]:
    """Draw the words and the rest of a body, and where it is cut off."""
    shape = REQUEST_SHAPES.get(opcode)
    fixed_bytes = shape.fixed_bytes if shape else draw(st.integers(0, 64))
    fixed = draw(st.lists(words, min_size=-(-fixed_bytes // 8), max_size=-(-fixed_bytes // 8)))
    rest = b"".join(draw(texts) + b"\0" for _ in range(shape.names if shape else 0))
    rest += draw(st.binary(max_size=64))
    cut = draw(st.none() | st.integers(0, fixed_bytes + len(rest)))
    return fixed, rest, fixed_bytes + len(rest) if cut is None else cut


@st.composite
def messages(draw: st.DrawFn) -> tuple[int, int, list[int], bytes, int]:
    """Draw a request: opcode, which inode, words, rest, length."""
    unknown = st.integers(0, (1 << 32) - 1).filter(lambda code: code not in set(Opcode))
    opcode = draw(st.sampled_from(ASKING) | unknown)
    return opcode, draw(st.integers(0, 3)), *draw(bodies(opcode))


def whole(fuzzed: Fuzzed, handle: int, words: list[int], rest: bytes, cut: int) -> bytes:
    """Return a body with the number of a living handle in the places that ask for one."""
    live = fuzzed.handles[handle % len(fuzzed.handles)]
    fixed = b"".join(struct.pack("<Q", live if word == LIVE else word) for word in words)
    return (fixed + rest)[:cut]


def assert_one_answer(
    fuzzed: Fuzzed, message: tuple[int, int, list[int], bytes, int], handle: int
) -> None:
    """Send *message* and assert that exactly one answer comes, and that the server lives on."""
    opcode, inode, words, rest, cut = message
    kernel = fuzzed.kernel()
    body = whole(fuzzed, handle, words, rest, cut)
    unique = kernel.send(opcode, fuzzed.inodes[inode], body)
    assert_deliverable(kernel.receive(), unique)
    assert_alive(kernel)


@settings(max_examples=300)
@given(message=messages(), handle=st.integers(0, 2))
def test_any_message_gets_one_answer(
    fuzzed: Fuzzed, message: tuple[int, int, list[int], bytes, int], handle: int
) -> None:
    assert_one_answer(fuzzed, message, handle)


@pytest.mark.proof
@settings(max_examples=20_000)
@given(message=messages(), handle=st.integers(0, 2))
def test_twenty_thousand_messages_get_one_answer_each(
    fuzzed: Fuzzed, message: tuple[int, int, list[int], bytes, int], handle: int
) -> None:
    assert_one_answer(fuzzed, message, handle)


@pytest.mark.parametrize("opcode", ASKING, ids=lambda code: Opcode(code).name)
def test_every_length_of_every_message_gets_one_answer(fuzzed: Fuzzed, opcode: int) -> None:
    """From no body at all to one with more than its kind knows, at once in the queue."""
    kernel = fuzzed.kernel()
    for filler in (b"\0", b"x", b"\xff"):
        sent = {kernel.send(opcode, 1, filler * length) for length in range(0, 100, 3)}
        for _ in range(len(sent)):
            reply = kernel.receive()
            assert_deliverable(reply, reply.unique)
            sent.remove(reply.unique)
        assert sent == set()
    assert_alive(kernel)


@pytest.mark.parametrize("opcode", [0, 7, 19, 54, 63, 64, 255, 4096, (1 << 31), (1 << 32) - 1])
def test_unknown_messages_are_not_implemented(fuzzed: Fuzzed, opcode: int) -> None:
    """ENOSYS makes the kernel stop asking, or do it by itself."""
    kernel = fuzzed.kernel()
    assert kernel.call(opcode, 1, b"new things").code == -errno.ENOSYS
    assert_alive(kernel)


@pytest.mark.parametrize("opcode", sorted(UNANSWERED), ids=lambda code: Opcode(code).name)
def test_messages_that_want_no_answer_get_none(fuzzed: Fuzzed, opcode: int) -> None:
    kernel = fuzzed.kernel()
    for length in (0, 7, 8, 16, 100):
        kernel.send(opcode, 1, b"\1" * length)
    assert_alive(kernel)


def test_a_write_shorter_than_it_says_is_refused(fuzzed: Fuzzed) -> None:
    """libfuse reads past the end of it: this was a SIGSEGV of the server."""
    kernel = fuzzed.kernel()
    [file_handle, *_] = fuzzed.handles
    body = struct.pack("<QQIIQII", file_handle, 0, 1 << 20, 0, 0, 0, 0)
    for announced in (body, body[:20], b""):
        assert kernel.call(Opcode.WRITE, fuzzed.inodes[-1], announced).code == -errno.EIO
    assert_alive(kernel)


@pytest.mark.parametrize("handle", [0, 1, (1 << 32) | 999_999, (1 << 64) - 1])
def test_handles_that_are_none_are_refused(fuzzed: Fuzzed, handle: int) -> None:
    kernel = fuzzed.kernel()
    body = struct.pack("<QQQQQQ", handle, 0, 4096, 0, 0, 0)
    for opcode in (Opcode.READ, Opcode.RELEASE, Opcode.READDIRPLUS, Opcode.LSEEK):
        assert kernel.call(opcode, fuzzed.inodes[-1], body).code == -errno.EBADF
    assert_alive(kernel)


def test_the_brackets_of_a_session_are_answered() -> None:
    """INIT twice, and a DESTROY, after which libfuse refuses what still comes."""
    with fake_kernel() as kernel:
        assert kernel.init().code == 0
        assert_deliverable(again := kernel.init(), again.unique)
        assert_deliverable(last := kernel.call(Opcode.DESTROY), last.unique)


def test_an_old_kernel_is_served() -> None:
    """Before Linux 5.17 there were no flags2, before 6.9 no passthrough."""
    with fake_kernel() as kernel:
        body = struct.pack("<IIII", 7, 34, 1 << 17, 0x3FFFFFFF)
        assert kernel.call(Opcode.INIT, 0, body).code == 0
        assert_alive(kernel)
        assert kernel.status()["data_path"] == "daemon"
