"""FALLOCATE without a kernel: room on a device that others fill, too."""

import errno
import os
from collections.abc import Iterator

import pytest
import trio

from kvfs.core.types import ROOT_INODE
from mount.fuse.late import Late
from mount.fuse.wire import FALLOCATE_IN, OUT_HEADER, Opcode
from mount.requests.raw import RawRequests
from tests.support.store.readers_desk import Desk
from tests.support.store.stores import FILE, MIB, assert_exact, host, settle


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """Files over a pool of ten blocks."""
    with host() as machine:
        made = Desk(machine, monkeypatch)
        made.store.configure(ready_extents_max=0)
        for number in range(10):
            made.put(b"%d" % number, bytes(MIB))
        settle(made.store)
        yield made
        made.close()


async def fallocated(desk: Desk, fh: int, size_bytes: int) -> int:
    """Allocate the first bytes of a file by a message; return the errno of the answer."""
    replies: list[bytes] = []
    async with trio.open_nursery() as nursery:
        late = Late(nursery, lambda header, body: replies.append(header + body))
        exotic = RawRequests(desk.files, late)
        request = memoryview(FALLOCATE_IN.pack(fh, 0, size_bytes, 0, 0))
        exotic.answers()[Opcode.FALLOCATE](7, 0, request)
    return -int(OUT_HEADER.unpack(replies[0])[1])


@pytest.mark.parametrize(("refusals", "answer"), [(1, 0), (2, 0), (3, errno.ENOSPC)])
async def test_blocks_go_for_it_on_a_device_that_others_filled(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, refusals: int, answer: int
) -> None:
    """As they do for a write; and what was allocated before it failed is accounted."""
    syscalls = desk.store.syscalls
    fh, _, ino, _ = desk.files.create(ROOT_INODE, b"slab", FILE, os.O_RDWR, 0, 0)
    fallocate = syscalls.fallocate
    parts_bytes = iter([MIB] * refusals)

    def refuse(fd: int, mode: int, offset_bytes: int, size_bytes: int) -> None:
        """Allocate a part, as XFS does, while there is no room."""
        part_bytes = next(parts_bytes, 0)
        fallocate(fd, mode, offset_bytes, part_bytes or size_bytes)
        if part_bytes:
            raise OSError(errno.ENOSPC, "others filled it")

    with monkeypatch.context() as patch:
        patch.setattr(syscalls, "fallocate", refuse)
        desk.store.fill_device(patch)
        assert await fallocated(desk, fh, 4 * MIB) == answer
    assert desk.store.evicted_blocks > 0
    assert desk.store.opened(ino).allocated_bytes == (MIB if answer else 4 * MIB)
    desk.files.release(fh)
    settle(desk.store)
    assert_exact(desk.host)
