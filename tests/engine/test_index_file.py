"""The index as files: room ahead of use, full file systems, and files that are no index."""

import contextlib
import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import lmdb
import pytest

from kvfs.core import records
from kvfs.core.errors import FormatUnknown, IndexDamaged, NoSpace
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.storage.index import Index
from kvfs.storage.lmdb_file import verify_data_file
from tests.support.devices.failing_syscalls import FailingSyscalls
from tests.support.mounts.mounting import mounted_at

MIB: Final = 1 << 20
PAGE: Final = 4096
MAP_BYTES: Final = 64 * MIB


def opened(path: Path, **options: object) -> Index:
    """Open the index in *path* with a small map and steps."""
    settings = {"map_size_bytes": MAP_BYTES, "preallocate_bytes": MIB, **options}
    return Index(str(path), **settings)  # type: ignore[arg-type]


def fill(index: Index, names: int, first: int = 16) -> None:
    """Create *names* names, each in a transaction of its own."""
    for ino in range(first, first + names):
        with index.write() as txn:
            txn.put_name(ROOT_INODE, b"%064d" % ino, InodeNo(ino))


def remove(index: Index, names: int, first: int = 16) -> None:
    """Remove what ``fill`` created."""
    for ino in range(first, first + names):
        with index.write() as txn:
            txn.delete_name(ROOT_INODE, b"%064d" % ino, InodeNo(ino))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The directory of an index with 500 names."""
    Index.create(str(tmp_path / "index"), MAP_BYTES, preallocate_bytes=MIB)
    with opened(tmp_path / "index") as index:
        fill(index, 500)
    return tmp_path / "index"


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 32 MiB."""
    with mounted_at(tmp_path / "small", "-t", "tmpfs", "-o", "size=32m", "kvfs-test") as place:
        yield place


def fill_the_disk(place: Path) -> None:
    with (
        contextlib.suppress(OSError),
        (place / "filler").open("ab", buffering=0) as file,
    ):
        while file.write(bytes(PAGE)) == PAGE:
            pass
    assert os.statvfs(place).f_bavail == 0


@pytest.mark.needs_fuse
def test_on_a_full_disk_an_index_with_room_ahead_removes_and_creates(small_disk: Path) -> None:
    Index.create(str(small_disk / "index"), MAP_BYTES, preallocate_bytes=4 * MIB)
    with opened(small_disk / "index", preallocate_bytes=4 * MIB) as index:
        fill(index, 500)
        fill_the_disk(small_disk)
        remove(index, 400)
        fill(index, 1000, first=1000)
        index.sync()
    with opened(small_disk / "index", preallocate_bytes=4 * MIB) as index:
        assert not index.preallocation_due()
        remove(index, 1000, first=1000)
        assert len(index.children(ROOT_INODE, InodeNo(0), 2000)) == 100


@pytest.mark.needs_fuse
def test_on_a_full_disk_without_room_ahead_writes_say_so_and_reads_go_on(small_disk: Path) -> None:
    Index.create(str(small_disk / "index"), MAP_BYTES, preallocate_bytes=PAGE)
    with opened(small_disk / "index", preallocate_bytes=PAGE) as index:
        fill(index, 500)
        fill_the_disk(small_disk)
        with pytest.raises(NoSpace):
            fill(index, 5000, first=1000)
        with pytest.raises(NoSpace):
            index.preallocate()
        kept = index.children(ROOT_INODE, InodeNo(0), 9999)
        assert len(kept) >= 500
    with opened(small_disk / "index", preallocate_bytes=PAGE) as index:
        assert index.preallocation_due()
        assert index.children(ROOT_INODE, InodeNo(0), 9999) == kept
        (small_disk / "filler").unlink()
        index.preallocate()
        fill(index, 5000, first=20_000)
        assert len(index.children(ROOT_INODE, InodeNo(0), 99_999)) == len(kept) + 5000
    assert verify_data_file(str(small_disk / "index")) == []


def test_room_is_asked_for_before_it_is_used(path: Path) -> None:
    with opened(path) as index:
        assert not index.preallocation_due()
        allocations = 0
        for turn in range(60):
            fill(index, 64, first=10_000 + 64 * turn)
            if index.preallocation_due():
                index.preallocate()
                allocations += 1
                assert not index.preallocation_due()
            status = (path / "data.mdb").stat()
            assert min(status.st_size, status.st_blocks * 512) >= index.used_bytes() + MIB // 2
        assert allocations >= 1


def test_a_disk_that_refuses_is_asked_again_but_not_at_every_turn(path: Path) -> None:
    syscalls = FailingSyscalls(["fallocate"], 1, errno.ENOSPC, for_good=True)
    with opened(path, preallocate_bytes=8 * MIB, syscalls=syscalls) as index:
        asked = 0
        for ino in range(10_000, 10_000 + 640):
            fill(index, 1, first=ino)
            asked += index.preallocation_due()
        assert 9 <= asked <= 11
        with pytest.raises(NoSpace):
            index.preallocate()


def test_allocation_ends_with_the_map(tmp_path: Path) -> None:
    Index.create(str(tmp_path / "index"), 2 * MIB, preallocate_bytes=16 * MIB)
    with opened(tmp_path / "index", map_size_bytes=2 * MIB, preallocate_bytes=16 * MIB) as index:
        assert (tmp_path / "index/data.mdb").stat().st_size == 2 * MIB
        assert not index.preallocation_due()


def test_a_full_map_is_no_space_and_loses_nothing(tmp_path: Path) -> None:
    Index.create(str(tmp_path / "index"), MIB, preallocate_bytes=MIB)
    with opened(tmp_path / "index", map_size_bytes=MIB) as index:
        with pytest.raises(NoSpace):
            fill(index, 100_000)
        rows = index.children(ROOT_INODE, InodeNo(0), 100_000)
        assert len(rows) > 1000
        assert rows == [(ino, b"%064d" % ino) for ino in range(16, 16 + len(rows))]


def test_a_full_disk_at_create_is_no_space(tmp_path: Path) -> None:
    for fail_at in (1, 2):
        syscalls = FailingSyscalls(["fallocate"], fail_at, errno.ENOSPC)
        with pytest.raises(NoSpace):
            Index.create(str(tmp_path / f"index{fail_at}"), MAP_BYTES, syscalls=syscalls)


def test_a_failing_device_is_an_os_error(path: Path) -> None:
    with opened(path, preallocate_bytes=8 * MIB) as index:
        fill(index, 10, first=9000)
    syscalls = FailingSyscalls(["fallocate"], 1, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        opened(path, preallocate_bytes=16 * MIB, syscalls=syscalls)


GARBAGE: Final = random.Random(7).randbytes(MIB)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "ends inside its meta page 0"),
        (bytes(MIB), "no LMDB meta page 0"),
        (GARBAGE, "no LMDB meta page 0"),
        (b"<html>\n" * 9999, "no LMDB meta page 0"),
    ],
    ids=["empty", "zeros", "garbage", "text"],
)
def test_a_foreign_file_is_refused_and_left_alone(path: Path, data: bytes, says: str) -> None:
    (path / "data.mdb").write_bytes(data)
    before = content(path)
    for read_only in (False, True):
        with pytest.raises(IndexDamaged, match=says) as caught:
            opened(path, read_only=read_only)
        assert "\n" not in str(caught.value)
    assert content(path) == before


@pytest.mark.parametrize("left_bytes", [100, PAGE, PAGE + 100, 2 * PAGE, 20 * PAGE])
def test_a_file_cut_short_is_refused(path: Path, left_bytes: int) -> None:
    os.truncate(path / "data.mdb", left_bytes)
    for read_only in (True, False):
        with pytest.raises(IndexDamaged):
            opened(path, read_only=read_only)


def test_a_file_cut_short_by_megabytes_is_refused_and_left_alone(path: Path) -> None:
    with opened(path) as index:
        fill(index, 20_000, first=10_000)
    os.truncate(path / "data.mdb", 8 * PAGE)
    before = content(path)
    with pytest.raises(IndexDamaged, match="cut short"):
        opened(path)
    assert content(path) == before


def churn_until_short(path: Path) -> None:
    """Write and delete in large transactions until LMDB counts pages that it never wrote."""
    order = random.Random(1)
    with lmdb.open(str(path), map_size=MAP_BYTES, sync=False) as environment:
        for _ in range(1000):
            with environment.begin(write=True) as txn:
                for _ in range(order.choice([3, 300])):
                    key = records.xattr_key(ROOT_INODE, b"%d" % order.randrange(200))
                    if not txn.delete(key):
                        txn.put(key, bytes(order.choice([200, 5000, 20_000])))
            used_bytes = (environment.info()["last_pgno"] + 1) * PAGE
            if (path / "data.mdb").stat().st_size < used_bytes:
                return
    pytest.fail("LMDB wrote every page it counted")


def test_a_sound_file_that_ends_before_lmdbs_last_page_opens(tmp_path: Path) -> None:
    Index.create(str(tmp_path / "index"), MAP_BYTES, preallocate_bytes=PAGE)
    churn_until_short(tmp_path / "index")
    with opened(tmp_path / "index") as index:
        fill(index, 500)
        assert len(index.children(ROOT_INODE, InodeNo(0), 500)) == 500


def test_one_garbage_meta_page_is_refused(path: Path) -> None:
    with (path / "data.mdb").open("r+b") as file:
        file.seek(PAGE)
        file.write(GARBAGE[:PAGE])
    with pytest.raises(IndexDamaged, match="meta page 1"):
        opened(path)


def test_a_missing_file_is_damage_not_a_new_index(path: Path) -> None:
    (path / "data.mdb").unlink()
    with pytest.raises(IndexDamaged, match=r"data\.mdb"):
        opened(path)
    assert not (path / "data.mdb").exists()


@pytest.mark.parametrize("filler", [b"\0", b"\xff"])
def test_a_tree_of_garbage_is_refused(path: Path, filler: bytes) -> None:
    with (path / "data.mdb").open("r+b") as file:
        file.seek(2 * PAGE)
        file.write(filler * (500 * 1024))
    with pytest.raises(IndexDamaged):
        opened(path)


def test_a_garbage_lock_file_is_made_anew(path: Path) -> None:
    (path / "lock.mdb").write_bytes(GARBAGE[:8192])
    with opened(path) as index:
        fill(index, 1, first=9000)
        assert index.lookup(ROOT_INODE, b"%064d" % 9000) == 9000


def rewrite(path: Path, key: bytes, value: bytes | None) -> None:
    with (
        lmdb.open(str(path), map_size=MAP_BYTES) as environment,
        environment.begin(write=True) as txn,
    ):
        assert txn.delete(key)
        if value is not None:
            txn.put(key, value)


def test_another_format_version_is_refused_by_name_and_left_alone(path: Path) -> None:
    rewrite(path, records.FORMAT_KEY, records.pack_format(2))
    before = content(path)
    with pytest.raises(FormatUnknown, match="found format 2, supported is 1"):
        opened(path)
    assert content(path) == before


@pytest.mark.parametrize("value", [None, b"", b"1", b"\0" * 8])
def test_a_missing_or_damaged_format_version_is_damage(path: Path, value: bytes | None) -> None:
    rewrite(path, records.FORMAT_KEY, value)
    with pytest.raises(IndexDamaged):
        opened(path)


def test_another_lmdb_version_is_refused_by_name(path: Path) -> None:
    with (path / "data.mdb").open("r+b") as file:
        file.seek(20)
        file.write((3).to_bytes(4, "little"))
    with pytest.raises(FormatUnknown, match="data version 3; supported is 1"):
        opened(path)


def test_the_verifier_finds_what_opening_cannot_see(path: Path) -> None:
    assert verify_data_file(str(path)) == []
    with (path / "data.mdb").open("r+b") as file:
        file.seek(10 * PAGE)
        file.write(bytes(PAGE))
    assert verify_data_file(str(path)) != []
    (path / "data.mdb").write_bytes(GARBAGE)
    assert verify_data_file(str(path)) != []
