"""New blocks in memory on a real mount: found, whole, and on the drive if they must be.

Memory that the machine is short of is given back, so a test does not say how much is in memory.
"""

import contextlib
import errno
import fcntl
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.fuse.conftest import PATHS, pool_source, require_passthrough
from tests.support.clients.churn import own_xfs
from tests.support.clients.stepping import until
from tests.support.kernel.calls import refused
from tests.support.mounts.mounting import Mounted, run_kvfs, skip_without_mounts, workplace
from tests.support.mounts.supervised import Supervised, skip_without_takeover

MIB: Final = 1 << 20
SIZE_BYTES: Final = 300_000
ROOM_BYTES: Final = 8 * MIB
CAPACITY_BYTES: Final = 64 * MIB
SOME: Final = 12
#: Half as many blocks again as the pool holds.
MANY: Final = 3 * CAPACITY_BYTES // 2 // SIZE_BYTES


@contextlib.contextmanager
def probation_mount(path: str, source: str = "tmpfs") -> Iterator[Supervised]:
    """Yield a mount with room in memory; in the end its log holds no error."""
    skip_without_mounts()
    if path == "native":
        pytest.skip("a declared difference: there is no server")
    flags = (f"--data-path={path}", f"--capacity={CAPACITY_BYTES}")
    sets = (f"probation_bytes={ROOM_BYTES}", "index_preallocate_bytes=1M")
    flags += tuple(word for each in sets for word in ("--set", each))
    with (
        workplace("disk") as place,
        pool_source(source, 512 * MIB)
        if "/" not in source
        else contextlib.nullcontext(source) as pool,
        Supervised(pool, place / "kv", *flags) as mounted,
    ):
        if path == "passthrough":
            require_passthrough(mounted)
        (mounted.path / "model").mkdir()
        store(mounted.path / "model" / "first", 0)  # how large blocks are is known
        yield mounted
        mounted.stop()
        assert mounted.errors() == []


@pytest.fixture(params=PATHS)
def mounted(request: pytest.FixtureRequest) -> Iterator[Supervised]:
    with probation_mount(request.param) as made:
        yield made


def content(number: int) -> bytes:
    return bytes([number % 251]) * SIZE_BYTES


def store(path: Path, number: int) -> None:
    """Store a block as connectors do."""
    draft = path.with_suffix(".tmp")
    draft.write_bytes(content(number))
    draft.rename(path)


def store_some(mounted: Mounted) -> list[Path]:
    """Store blocks, some of them in memory."""
    blocks = [mounted.path / "model" / str(number) for number in range(SOME)]
    for number, block in enumerate(blocks):
        store(block, number)
    shown = told(mounted)
    assert shown["stored"] + shown["refused"] > 0, (
        "there is room, or the machine is short of memory"
    )
    return blocks


def told(mounted: Mounted) -> dict[str, Any]:
    """Return what the status says of blocks in memory."""
    shown: dict[str, Any] = mounted.status()["probation"]
    return shown


def assert_all_there(blocks: list[Path]) -> None:
    for number, block in enumerate(blocks):
        assert block.read_bytes() == content(number)


def assert_right(blocks: list[Path]) -> int:
    """Each block is whole or gone; return how many are there."""
    there = 0
    for number, block in enumerate(blocks):
        with contextlib.suppress(FileNotFoundError):
            assert block.read_bytes() == content(number)
            there += 1
    return there


def test_blocks_are_read_from_memory_and_counted(mounted: Supervised) -> None:
    before = os.statvfs(mounted.path)
    blocks = store_some(mounted)
    assert_all_there(blocks)
    after = os.statvfs(mounted.path)
    assert after.f_blocks == before.f_blocks
    status = mounted.status()
    assert status["blocks"] == SOME + 1
    assert status["used_bytes"] >= (SOME + 1) * SIZE_BYTES
    shown = status["probation"]
    assert shown["bytes"] <= ROOM_BYTES
    assert shown["bytes"] >= shown["blocks"] * SIZE_BYTES


def test_a_killed_server_is_followed_and_all_is_there(mounted: Supervised) -> None:
    """[taken-over] Blocks in memory, one that is open, and a draft that is being written."""
    blocks = store_some(mounted)
    skip_without_takeover(mounted)
    with blocks[3].open("rb") as reader, blocks[0].with_suffix(".new").open("xb", 0) as draft:
        draft.write(content(7)[:1000])
        for _ in range(2):
            mounted.kill_server()
            mounted.follow()
            assert reader.read() == content(3)
            reader.seek(0)
            assert_all_there(blocks)
        draft.write(content(7)[1000:])
        draft.flush()
    assert blocks[0].with_suffix(".new").read_bytes() == content(7)
    assert_all_there(blocks)


def test_another_version_follows_and_all_is_there(mounted: Supervised) -> None:
    blocks = store_some(mounted)
    skip_without_takeover(mounted)
    run_kvfs("upgrade", str(mounted.path))
    mounted.adopt()
    assert_all_there(blocks)


def test_all_is_there_after_server_and_supervisor_were_killed(mounted: Supervised) -> None:
    """[probation] It outlives both, as the index does."""
    blocks = store_some(mounted)
    mounted.kill_daemon()
    mounted.start()
    assert_all_there(blocks)


def test_a_stop_leaves_nothing_in_memory(mounted: Supervised) -> None:
    """[probation] What is not pinned or leased may be gone."""
    blocks = store_some(mounted)
    memory = Path(mounted.status()["index_in"]).parent
    assert memory.is_dir()
    mounted.stop()
    assert not memory.exists()
    mounted.start()
    assert told(mounted)["blocks"] == 0
    assert_right(blocks)


def test_a_sync_writes_what_is_in_memory(mounted: Supervised) -> None:
    """[probation] It is on the drive, and stays through a stop by force."""
    blocks = store_some(mounted)
    done = json.loads(run_kvfs("sync", str(mounted.path), "--json").stdout)
    assert (done["left_blocks"], done["held_blocks"]) == (0, 0)
    assert told(mounted)["blocks"] == 0
    assert_all_there(blocks)
    mounted.kill_daemon()
    mounted.start()
    assert_all_there(blocks)


def test_a_full_pool_takes_all_stores(mounted: Supervised) -> None:
    blocks = [mounted.path / "model" / str(number) for number in range(MANY)]
    for number, block in enumerate(blocks):
        store(block, number)
        assert block.read_bytes() == content(number)
    assert 0 < assert_right(blocks) < MANY
    shown = mounted.status()
    assert shown["probation"]["bytes"] <= ROOM_BYTES
    assert shown["used_bytes"] <= CAPACITY_BYTES


@pytest.mark.parametrize("path", PATHS)
def test_a_draft_outgrows_memory_under_its_writers(path: str) -> None:
    """On XFS, where a write allocates first; fallocate(2) outgrows it, too."""
    with probation_mount(path, "xfs") as mounted:
        store_some(mounted)
        grown = mounted.path / "model" / "grown"
        pieces = [bytes([at]) * (MIB // 4) for at in range(4)]
        with grown.with_suffix(".tmp").open("xb", 0) as draft:
            draft.write(b"head")

            def write(writer: int) -> None:
                for at in range(10):
                    offset_bytes = 4 + (writer * 10 + at) * len(pieces[0])
                    assert os.pwrite(draft.fileno(), pieces[writer], offset_bytes) == MIB // 4

            writers = [threading.Thread(target=write, args=(at,)) for at in range(4)]
            for thread in writers:
                thread.start()
            for thread in writers:
                thread.join()
            assert told(mounted)["bytes"] <= ROOM_BYTES
        grown.with_suffix(".tmp").rename(grown)
        assert grown.read_bytes() == b"head" + b"".join(piece * 10 for piece in pieces)
        reserved = grown.with_name("reserved.tmp")
        with reserved.open("xb", 0) as draft:
            draft.write(b"head")
            os.posix_fallocate(draft.fileno(), 0, ROOM_BYTES)
            assert told(mounted)["bytes"] <= ROOM_BYTES
        assert reserved.read_bytes() == b"head".ljust(ROOM_BYTES, b"\0")


def test_a_block_that_is_always_open_is_written_by_a_sync(mounted: Supervised) -> None:
    """[probation] Where the kernel reads it itself, its readers keep what they have."""
    blocks = store_some(mounted)
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(block.open("rb", 0)) for block in blocks]
        for number, reader in enumerate(readers):
            assert reader.read(10) == content(number)[:10]
        done = json.loads(run_kvfs("sync", str(mounted.path), "--json").stdout)
        assert (done["left_blocks"], done["held_blocks"]) == (0, 0)
        assert_all_there(blocks)
        for number, reader in enumerate(readers):
            reader.seek(0)
            assert reader.read() == content(number)
        mounted.kill_server()
        mounted.follow()
        for number, reader in enumerate(readers):
            reader.seek(0)
            assert reader.read() == content(number)
    until(lambda: mounted.status()["open_inodes"] == 0, "all are closed")
    until(lambda: told(mounted)["blocks"] == 0, "memory is free")
    assert_all_there(blocks)


def test_a_rewrite_beside_a_reader_grows_on_the_drive(mounted: Supervised) -> None:
    """[life-rewrite] [probation] Memory has its bound, whoever writes."""
    block, shorter, *_ = store_some(mounted)
    with shorter.open("rb", 0) as reader:
        assert reader.read(10) == content(1)[:10]
        os.truncate(shorter, 10)  # which opens nothing, and is led to the copy as well
        with shorter.open("ab", 0) as writer:
            assert writer.write(b"more") == len(b"more")
        reader.seek(0)
        assert reader.read() in (content(1), content(1)[:10] + b"more")
    assert shorter.read_bytes() == content(1)[:10] + b"more"
    with block.open("rb", 0) as reader:
        assert reader.read(10) == content(0)[:10]
        grown = b"new" * (ROOM_BYTES // 2)
        with block.open("r+b", 0) as writer:
            assert writer.write(grown) == len(grown)
            assert told(mounted)["bytes"] <= ROOM_BYTES
        reader.seek(0)
        assert reader.read() in (content(0), grown)
        assert block.read_bytes() == grown
    assert block.read_bytes() == grown


def test_a_file_that_somebody_locks_keeps_its_inode() -> None:
    """[probation] Else two would hold the lock."""
    with probation_mount("passthrough") as mounted:
        blocks = store_some(mounted)
        before = [block.stat().st_ino for block in blocks]
        with contextlib.ExitStack() as stack:
            for block in blocks:
                fcntl.flock(stack.enter_context(block.open("rb", 0)), fcntl.LOCK_SH)
            run_kvfs("sync", str(mounted.path), "--timeout", "7s", check=False)
            assert [block.stat().st_ino for block in blocks] == before


@pytest.mark.parametrize("path", PATHS)
def test_a_draft_that_cannot_leave_memory_is_refused_and_goes(path: str) -> None:
    """Others fill the drive: a block of which a write was refused is a miss, never a part."""
    with own_xfs(512 * MIB) as pool, probation_mount(path, str(pool)) as mounted:
        store_some(mounted)
        draft, others = mounted.path / "model" / "grown.tmp", pool / "others"
        with draft.open("xb", 0) as writer:
            writer.write(content(1))
            with others.open("xb", 0) as file, refused(errno.ENOSPC):
                for size_bytes in (64 * MIB, MIB, 4096):
                    with contextlib.suppress(OSError):
                        while True:
                            os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), size_bytes)
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), 4096)
            with refused(errno.ENOSPC):
                for _ in range(2 * ROOM_BYTES // SIZE_BYTES):
                    writer.write(content(1))
            assert told(mounted)["bytes"] <= ROOM_BYTES
            others.unlink()
        until(lambda: not draft.exists(), "what was refused a write is gone")
