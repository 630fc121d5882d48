"""ftruncate that lengthens a file under writing: it has its space then, up to a bound."""

import os
from collections.abc import Iterator

import pytest

from kvfs.core.types import ROOT_INODE, InodeNo
from mount.requests.changes import Changes
from tests.support.store.counted_desk import CountedDesk, counted_desk
from tests.support.store.driven import NewAttributes
from tests.support.store.stores import MIB, put, settle

#: What a draft gets when it is created, because its directory's blocks have it.
RESERVE_BYTES = 4 * MIB


@pytest.fixture
def desk() -> Iterator[CountedDesk]:
    """Files over a pool of 64 MiB, nearly full of blocks that may go."""
    with counted_desk() as made:
        made.store.configure(ready_extents_max=0)
        for number in range(15):
            put(made.store, ROOT_INODE, b"tmp", bytes(4 * MIB))
            made.store.rename(ROOT_INODE, b"tmp", ROOT_INODE, b"%d" % number, replace=True)
        settle(made.store)
        yield made


async def lengthen(desk: CountedDesk, fh: int, ino: InodeNo, size_bytes: int) -> int:
    """Set the length by descriptor; return what the extent holds then."""
    await Changes(desk.files).change(ino, NewAttributes(size_bytes=size_bytes), fh)
    assert desk.store.present(ino).size_bytes == size_bytes
    return desk.store.extent_bytes(desk.files.extent_fd(fh))


async def test_it_has_its_space_up_to_the_bound(desk: CountedDesk) -> None:
    """[truncate-up] Half of 64 MiB, for all together."""
    one, one_ino = desk.create(b"one")
    other, other_ino = desk.create(b"other")
    before = desk.store.evicted_blocks
    assert await lengthen(desk, one, one_ino, 20 * MIB) == 20 * MIB
    assert await lengthen(desk, one, one_ino, 24 * MIB) == 24 * MIB
    assert desk.store.evicted_blocks - before == (24 * MIB - RESERVE_BYTES) // (4 * MIB)
    assert await lengthen(desk, other, other_ino, 17 * MIB) == RESERVE_BYTES
    await lengthen(desk, other, other_ino, 0)
    assert await lengthen(desk, other, other_ino, 12 * MIB) == 12 * MIB
    for fh in (one, other):
        desk.close_file(fh)
    settle(desk.store)
    desk.assert_nothing_is_open()


async def test_who_is_closed_counts_no_more(desk: CountedDesk) -> None:
    for number in range(3):
        fh, ino = desk.create(b"draft%d" % number)
        assert await lengthen(desk, fh, ino, 24 * MIB) == 24 * MIB
        os.pwrite(desk.files.extent_fd(fh), b"end", 24 * MIB - 3)
        desk.close_file(fh)
        desk.store.unlink(ROOT_INODE, b"draft%d" % number)
    settle(desk.store)
    desk.assert_nothing_is_open()


@pytest.mark.parametrize("size_bytes", [37 * MIB, 1 << 40, 1 << 50])
async def test_a_longer_one_is_sparse(desk: CountedDesk, size_bytes: int) -> None:
    """[truncate-huge] And nothing is evicted for it, but a little ahead of its writer."""
    fh, ino = desk.create(b"sparse")
    before = desk.store.evicted_blocks
    assert await lengthen(desk, fh, ino, size_bytes) == RESERVE_BYTES
    assert desk.store.evicted_blocks - before <= 1
    desk.files.release(fh)


async def test_where_nothing_may_go_it_is_sparse(desk: CountedDesk) -> None:
    """[truncate-huge] Not ENOSPC: nobody says that it will be written."""
    held, held_ino = desk.create(b"held")
    await desk.transfers.write(held, 0, bytes(40 * MIB))
    fh, ino = desk.create(b"sparse")
    assert await lengthen(desk, fh, ino, 30 * MIB) == RESERVE_BYTES
    assert desk.store.present(held_ino).size_bytes == 40 * MIB
    for each in (fh, held):
        desk.files.release(each)


async def test_the_setting_turns_it_off(desk: CountedDesk) -> None:
    desk.store.configure(length_share=0.0)
    fh, ino = desk.create(b"sparse")
    assert await lengthen(desk, fh, ino, 8 * MIB) == RESERVE_BYTES
    desk.files.release(fh)
