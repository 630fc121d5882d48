"""Whatever the index can hold of an inode can be told to the kernel, by the lane and by pyfuse3."""

import stat
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import example, given
from hypothesis import strategies as st

from kvfs.core.lifecycle import State
from kvfs.core.records import pack_inode, parse_inode
from kvfs.core.settings import Settings
from kvfs.core.types import NAME_MAX_BYTES, InodeNo, InodeRecord, Sequence
from mount.fuse.wire import ATTR, ENTRY_OUT_BYTES
from mount.requests.answers import Answers, Generations
from mount.requests.fast import entry_out
from mount.requests.replies import entry_attributes

U32 = (1 << 32) - 1
I63 = (1 << 63) - 1
GENERATION = (1 << 64) - 1
moments_ns = st.sampled_from([-I63 - 1, -1, 0, 1, 999_999_999, I63]) | st.integers(-I63 - 1, I63)
sizes = st.sampled_from([0, 1, 4096, I63]) | st.integers(0, I63)
words = st.sampled_from([0, 1, U32]) | st.integers(0, U32)
#: The generation and the range ends of inode numbers leave the highest bit alone.
numbers = st.integers(1, I63)


@st.composite
def records(draw: st.DrawFn) -> InodeRecord:
    """Draw any record that the index could hold."""
    kind = draw(st.sampled_from([stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO]))
    return InodeRecord(
        mode=kind | draw(st.integers(0, 0o7777)),
        uid=draw(words),
        gid=draw(words),
        state=draw(st.sampled_from([State.NODE, State.DRAFT, State.PUBLISHED])),
        size_bytes=draw(sizes),
        allocated_bytes=draw(sizes),
        atime_ns=draw(moments_ns),
        mtime_ns=draw(moments_ns),
        ctime_ns=draw(moments_ns),
        btime_ns=draw(moments_ns),
        parent=InodeNo(draw(numbers)),
        entries=draw(words),
        subdirs=draw(words),
        sequence=Sequence(draw(numbers)),
        name=draw(st.binary(min_size=1, max_size=NAME_MAX_BYTES)),
    )


def answers() -> Answers:
    """Return the answers of a store in which nothing is open."""
    truncating = SimpleNamespace(refusals=None)
    looks = SimpleNamespace(apply=lambda **_: None)
    store = SimpleNamespace(
        namespace=None,
        pool=SimpleNamespace(
            open=SimpleNamespace(inodes={}),
            rules=SimpleNamespace(heat=None),
            figures=SimpleNamespace(looks=looks),
        ),
        blocks=SimpleNamespace(truncating=truncating),
    )
    files = cast(
        "Any", SimpleNamespace(request=None, readers=SimpleNamespace(attributes_head=bytearray(16)))
    )
    unused = cast("Any", None)
    return Answers(cast("Any", store), files, Settings(), Generations(GENERATION), unused)


FAR = InodeRecord(
    stat.S_IFDIR | 0o7777, U32, U32, State.NODE, I63, I63, *[-I63 - 1] * 4, InodeNo(I63), U32, U32,
    Sequence(I63), b"n",
)  # fmt: skip


@given(ino=numbers, record=records())
@example(ino=I63, record=FAR)
def test_what_the_index_holds_can_be_told(ino: int, record: InodeRecord) -> None:
    """Both ways say the same, to the nanosecond."""
    assert parse_inode(pack_inode(record)) == record
    answer = answers().entry(InodeNo(ino), record)
    told = entry_out(answer)
    assert len(told) == ENTRY_OUT_BYTES
    entry = entry_attributes(answer)
    found, size, blocks, *times, mode, nlink, uid, gid, _, blksize, _ = ATTR.unpack(
        told[-ATTR.size :]
    )
    assert (found, size, blocks) == (entry.st_ino, entry.st_size, entry.st_blocks)
    assert (mode, nlink, uid, gid) == (entry.st_mode, entry.st_nlink, entry.st_uid, entry.st_gid)
    assert blksize == entry.st_blksize
    moments = (entry.st_atime_ns, entry.st_mtime_ns, entry.st_ctime_ns)
    for at, moment_ns in enumerate(moments):
        assert times[at] * 1_000_000_000 + times[at + 3] == moment_ns
        assert 0 <= times[at + 3] < 1_000_000_000
