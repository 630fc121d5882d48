"""What a failed write and a failed fsync leave: half a block stays invisible, its writer hears."""

import errno
import os
from collections.abc import Callable, Iterator

import pytest

from kvfs.core.errors import DeadInode, NoSpace, NotFound
from kvfs.core.types import ROOT_INODE, InodeNo
from tests.support.store.counted_desk import CountedDesk, counted_desk
from tests.support.store.stores import MIB, get, put, settle

PIECE = b"p" * MIB


@pytest.fixture
def desk() -> Iterator[CountedDesk]:
    """Files over a fresh pool in memory."""
    with counted_desk() as made:
        yield made


def fails_after(
    call: Callable[[int, memoryview, int], int], taken_bytes: int, error_no: int
) -> Callable[[int, memoryview, int], int]:
    """Return pwrite on a device that takes *taken_bytes* of what is asked for, and then no more."""
    left_bytes = taken_bytes

    def pwrite(fd: int, data: memoryview, offset_bytes: int) -> int:
        nonlocal left_bytes
        if not left_bytes:
            raise OSError(error_no, os.strerror(error_no))
        done_bytes = call(fd, data[:left_bytes], offset_bytes)
        left_bytes -= done_bytes
        return done_bytes

    return pwrite


def assert_gone(desk: CountedDesk, name: bytes, ino: InodeNo) -> None:
    """No name leads to the block, and none can be given to it."""
    with pytest.raises(NotFound):
        desk.store.lookup(ROOT_INODE, name)
    with pytest.raises(DeadInode):
        desk.store.present(ino)
    desk.assert_nothing_is_open()


@pytest.mark.parametrize("error_no", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
async def test_a_block_whose_write_failed_in_its_middle_is_never_seen(
    desk: CountedDesk, monkeypatch: pytest.MonkeyPatch, error_no: int
) -> None:
    """[write-errors] The writer closes as if nothing were: what it has is half a block."""
    syscalls = desk.store.syscalls
    fh, ino = desk.create(b"block")
    assert await desk.transfers.write(fh, 0, PIECE) == MIB
    monkeypatch.setattr(syscalls, "pwrite", fails_after(syscalls.pwrite, 0, error_no))
    with pytest.raises((NoSpace, OSError)):
        await desk.transfers.write(fh, MIB, PIECE)
    monkeypatch.undo()
    desk.close_file(fh)
    assert_gone(desk, b"block", ino)


async def test_what_a_full_device_took_of_a_piece_does_not_make_it_whole(
    desk: CountedDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[write-errors] ENOSPC behind the first bytes of one write."""
    syscalls = desk.store.syscalls
    fh, ino = desk.create(b"block")
    monkeypatch.setattr(syscalls, "pwrite", fails_after(syscalls.pwrite, 4096, errno.ENOSPC))
    with pytest.raises((NoSpace, OSError)):
        await desk.transfers.write(fh, 0, PIECE)
    monkeypatch.undo()
    desk.close_file(fh)
    assert_gone(desk, b"block", ino)


async def test_half_a_block_takes_no_final_name(
    desk: CountedDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[write-errors] What was there under it stays, whole."""
    store, syscalls = desk.store, desk.store.syscalls
    put(store, ROOT_INODE, b"final", b"whole")
    fh, _ = desk.create(b"draft.tmp")
    assert await desk.transfers.write(fh, 0, PIECE) == MIB
    monkeypatch.setattr(syscalls, "pwrite", fails_after(syscalls.pwrite, 0, errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        await desk.transfers.write(fh, MIB, PIECE)
    monkeypatch.undo()
    desk.close_file(fh)
    with pytest.raises(NotFound):
        store.rename(ROOT_INODE, b"draft.tmp", ROOT_INODE, b"final", replace=True)
    assert get(store, ROOT_INODE, b"final") == b"whole"


@pytest.mark.usefixtures("caplog")
def test_a_writer_that_was_stopped_hears_of_it_when_it_closes(desk: CountedDesk) -> None:
    """[write-errors] Its writes went past the server: none of them could say so."""
    store = desk.store
    store.let_writers_run()
    settle(store)  # until then there may be blocks that could go
    fh, ino = desk.create(b"greedy")
    opened = store.opened(ino)
    opened.through_daemon = False
    store.let_run(opened)
    os.pwrite(desk.files.extent_fd(fh), bytes(68 * MIB), 0)
    store.watch(0.0)
    with pytest.raises(NoSpace):
        desk.files.flush(fh, os.getpid())
    desk.files.release(fh)
    assert_gone(desk, b"greedy", ino)


async def test_an_fsync_is_one_of_the_file_before_all_others(
    desk: CountedDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[fsync] The rest waits for its bytes, too, but another may have been told of the error."""
    synced: list[object] = []
    syscalls = desk.store.syscalls
    fh, ino = desk.create(b"block")
    assert await desk.transfers.write(fh, 0, PIECE) == MIB
    own = os.fstat(desk.files.extent_fd(fh)).st_ino

    def lost(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(syscalls, "fsync", lost)
    desk.store.note_calls(monkeypatch, "sync", lambda: synced.append("all"))
    with pytest.raises(OSError, match="Input/output error"):
        await desk.files.sync(fh)
    assert synced == [own]
    monkeypatch.setattr(syscalls, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    await desk.files.sync(fh)
    assert synced[1:] == [own, "all"]
    desk.close_file(fh)
    assert desk.store.present(ino).size_bytes == MIB
