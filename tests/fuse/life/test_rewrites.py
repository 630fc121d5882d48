"""Rewrites of blocks that others read, slabs, and leases over a restart of the server."""

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fuse.conftest import require_passthrough
from tests.support.clients.callers import Caller
from tests.support.clients.stamped import seed_of, stamped, state
from tests.support.clients.stepping import Stepping, until
from tests.support.kernel.calls import opened, read_file, refused, tolerated, write_file
from tests.support.mounts.mounting import Mounted, skip_without_mounts, workplace

pytestmark = pytest.mark.usefixtures("kvfs_only")
SIZE = 256 << 10
REWRITES = 1000
CREATE = os.O_WRONLY | os.O_CREAT
CAPACITY = "64MiB"
GONE_WAIT_S = 10.0


def truncating(path: Path, seed: int) -> None:
    """Rewrite *path* as LMCache's local_disk does."""
    write_file(path, stamped("K", SIZE, seed))


def renaming(path: Path, seed: int) -> None:
    """Rewrite *path* as most connectors do."""
    write_file(path.with_name("K.tmp"), stamped("K", SIZE, seed))
    os.rename(path.with_name("K.tmp"), path)


def whole_by_mapping(path: Path) -> int:
    """Return the version that a mapping shows."""
    with opened(path, os.O_RDONLY) as fd:
        size_bytes = os.fstat(fd).st_size
        if size_bytes == 0:
            return -1
        with mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ) as memory:
            return seed_of(memory[:], "K", SIZE)


def whole_by_reading(path: Path) -> int:
    """Return the version that one descriptor reads, in pieces."""
    return seed_of(read_file(path), "K", SIZE)


@pytest.mark.parametrize("read", [whole_by_reading, whole_by_mapping])
@pytest.mark.parametrize("rewrite", [renaming, truncating])
def test_readers_of_a_block_that_is_rewritten_see_whole_versions(
    kv: Path, rewrite: Callable[[Path, int], None], read: Callable[[Path], int]
) -> None:
    """[life-rewrite] 1,000 versions of another process: each read shows a whole one, in order."""
    rewrite(kv / "K", 0)
    versions: list[int] = []
    wrong: list[BaseException] = []
    finished = threading.Event()

    def reader() -> None:
        try:
            while not finished.is_set():
                versions.append(read(kv / "K"))
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=reader)
    thread.start()
    try:
        with Stepping(
            "tests.support.clients.writers", rewrite.__name__, kv / "K", REWRITES
        ) as writer:
            assert writer.at() == "rewritten"
            assert read(kv / "K") == REWRITES - 1
    finally:
        finished.set()
        thread.join()
    assert not wrong
    assert len(set(versions)) > 10
    assert versions == sorted(versions)
    assert read(kv / "K") == REWRITES - 1


def test_readers_of_a_block_truncated_keep_the_version_they_opened(kv: Path) -> None:
    """[life-rewrite] 1,000 times O_TRUNC: a descriptor and a mapping show the version opened."""
    truncating(kv / "K", 0)
    inodes = set()
    for number in range(1, REWRITES):
        with opened(kv / "K", os.O_RDONLY) as fd:
            inodes.add(os.fstat(fd).st_ino)
            if number % 2:
                memory = mmap.mmap(fd, SIZE, prot=mmap.PROT_READ)
            with opened(kv / "K", CREATE | os.O_TRUNC) as writer:
                # The name shows the draft, the descriptor its own block.
                os.write(writer, stamped("K", SIZE, number)[: SIZE // 2])
                assert os.stat(kv / "K").st_size == SIZE // 2
                assert os.fstat(fd).st_size == SIZE
                os.write(writer, stamped("K", SIZE, number)[SIZE // 2 :])
            if number % 2:
                assert seed_of(memory[:], "K", SIZE) == number - 1
                memory.close()
            assert seed_of(os.pread(fd, SIZE + 1, 0), "K", SIZE) == number - 1
        assert state(kv / "K") == "leased"
    assert len(inodes) == REWRITES - 1
    assert whole_by_reading(kv / "K") == REWRITES - 1


def test_others_rewrite_with_truncation_under_a_reader(kv: Path) -> None:
    """[life-rewrite] By another process: what was whole when it was opened stays whole."""
    truncating(kv / "K", 0)
    with Caller() as writer:
        for number in range(1, 100):
            with opened(kv / "K", os.O_RDONLY) as fd:
                remote = writer.os("open", str(kv / "K"), CREATE | os.O_TRUNC, 0o644)
                assert seed_of(os.pread(fd, SIZE + 1, 0), "K", SIZE) == number - 1
                writer.os("write", remote, stamped("K", SIZE, number))
                assert seed_of(os.pread(fd, SIZE + 1, 0), "K", SIZE) == number - 1
                writer.os("close", remote)
            assert whole_by_reading(kv / "K") == number


def test_others_see_the_version_before_until_the_new_is_whole(kv: Path) -> None:
    """[life-rewrite] By name, listing, size and state; a draft's writer sees his draft."""
    renaming(kv / "K", 0)
    with Caller() as writer:
        fd = writer.os("open", str(kv / "K"), CREATE | os.O_TRUNC, 0o644)
        for at in range(0, SIZE, SIZE // 2):
            writer.os("write", fd, stamped("K", SIZE, 1)[at : at + SIZE // 2])
            assert whole_by_reading(kv / "K") == whole_by_mapping(kv / "K") == 0
            assert (os.stat(kv / "K").st_size, os.stat(kv / "K").st_nlink) == (SIZE, 1)
            assert writer.os("stat", str(kv / "K")).st_size == at + SIZE // 2
            assert state(kv / "K") == "published"
            (row,) = os.scandir(kv)
            assert (row.name, row.inode()) == ("K", os.stat(kv / "K").st_ino)
            with refused(errno.ESTALE):
                os.open(kv / "K", os.O_WRONLY)
        writer.os("close", fd)
        assert whole_by_reading(kv / "K") == 1
        assert state(kv / "K") == "leased"
        fd = writer.os("open", str(kv / "K"), CREATE | os.O_TRUNC, 0o644)
        writer.os("write", fd, b"torn")
        assert whole_by_reading(kv / "K") == 1
    until(lambda: not os.path.exists(kv / "K"), "gone with its writer", GONE_WAIT_S)


def test_owner_and_mode_set_meanwhile_stay(kv: Path) -> None:
    """[life-rewrite] chmod, chown and xattrs by name while others are shown the version before."""
    renaming(kv / "K", 0)
    with Caller() as writer:
        fd = writer.os("open", str(kv / "K"), CREATE | os.O_TRUNC, 0o644)
        writer.os("write", fd, stamped("K", SIZE, 1))
        os.chmod(kv / "K", 0o600)
        os.chown(kv / "K", 1000, 1001)
        os.setxattr(kv / "K", "user.a", b"1")
        assert whole_by_reading(kv / "K") == 0
        before = os.stat(kv / "K")
        writer.os("close", fd)
        assert whole_by_reading(kv / "K") == 1
        for info in (before, os.stat(kv / "K")):
            assert (info.st_mode & 0o777, info.st_uid, info.st_gid) == (0o600, 1000, 1001)
        assert os.getxattr(kv / "K", "user.a") == b"1"


def test_append_keeps_a_lease(kv: Path) -> None:
    """[life-leased] A block that is only appended to is no slab."""
    write_file(kv / "log", b"one ")
    with opened(kv / "log", os.O_WRONLY | os.O_APPEND) as fd:
        os.write(fd, b"two")
        assert state(kv / "log") == "rewrite"
    assert state(kv / "log") == "leased"
    assert read_file(kv / "log") == b"one two"


def test_opened_for_writing_and_not_written_changes_nothing(kv: Path) -> None:
    """[life-published] A published block stays published."""
    renaming(kv / "K", 0)
    with opened(kv / "K", os.O_RDWR):
        assert state(kv / "K") == "rewrite"
    assert state(kv / "K") == "published"


def test_a_rewrite_in_place_makes_a_slab(kv: Path) -> None:
    """[life-slab] The slab of who rewrote it, spent when that has ended."""
    renaming(kv / "K", 0)
    with Caller() as writer:
        fd = writer.os("open", str(kv / "K"), os.O_RDWR)
        writer.os("pwrite", fd, stamped("K", SIZE, 1), 0)
        assert state(kv / "K") == "rewrite"
        writer.os("close", fd)
        assert state(kv / "K") == "slab"
        assert whole_by_reading(kv / "K") == 1
    until(lambda: state(kv / "K") == "orphan_slab", "orphan_slab", GONE_WAIT_S)
    assert whole_by_reading(kv / "K") == 1


@pytest.mark.parametrize("allocates", [False, True])
def test_killed_in_a_rewrite_in_place(kv: Path, allocates: bool) -> None:
    """[life-torn] [life-slab] Half old, half new: the name goes, also after a fallocate."""
    renaming(kv / "K", 0)
    with Caller() as writer:
        fd = writer.os("open", str(kv / "K"), os.O_RDWR)
        if allocates:
            writer.os("posix_fallocate", fd, 0, 2 * SIZE)
            assert state(kv / "K") == "rewrite"
        writer.os("pwrite", fd, stamped("K", SIZE // 2, 1), 0)
    until(lambda: not os.path.exists(kv / "K"), "gone", GONE_WAIT_S)
    assert os.listdir(kv) == []


def test_killed_with_a_block_open_for_writing_but_unwritten(kv: Path) -> None:
    """[life-torn] Nothing was torn: it stays."""
    renaming(kv / "K", 0)
    with Caller() as writer:
        writer.os("open", str(kv / "K"), os.O_RDWR)
    until(lambda: state(kv / "K") == "published", "published", GONE_WAIT_S)
    assert whole_by_reading(kv / "K") == 0


# ---- small pools and restarts ----


@pytest.fixture(params=["daemon", "passthrough"])
def small(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A mount of its own with a small capacity."""
    skip_without_mounts()
    flags = [f"--data-path={request.param}", "--capacity", CAPACITY]
    with workplace("disk") as directory, workplace() as source:
        (source / "pool").mkdir()
        with Mounted(source / "pool", directory / "kv", *flags) as mount:
            if request.param == "passthrough":
                require_passthrough(mount)
            yield mount
            mount.stop()
            assert mount.errors() == []


def test_a_mapping_of_a_removed_block_reads_its_own_bytes(small: Mounted) -> None:
    """[unlink-open] After the pool was filled anew with other blocks, several times."""
    block = small.path / "K"
    size_bytes = 4 << 20
    write_file(block, stamped("K", size_bytes, 7))
    with Stepping("tests.support.clients.writers", "reads_mapped", block) as reader:
        assert reader.at() == "same"
        os.unlink(block)
        for turn in range(3):
            names = fill(small.path, turn)
            assert len(names) >= 8, "the pool took less than half of its capacity"
            reader.to("same")
            for name in names:
                os.unlink(small.path / name)
        reader.to("same")


def fill(directory: Path, turn: int) -> list[str]:
    """Store blocks until the pool is full; return the names of the whole ones."""
    names: list[str] = []
    for number in range(64):
        name = f"filler-{turn}-{number}"
        full = True
        with tolerated(errno.ENOSPC):
            write_file(directory / name, stamped(name, 4 << 20))
            full = False
        if full:
            (directory / name).unlink(missing_ok=True)
            return names
        names.append(name)
    raise AssertionError("the pool is never full")


def test_leases_outlive_a_restart_of_the_server(small: Mounted) -> None:
    """[life-leased] Unmounted and mounted again: leased to the living, published of the dead."""
    with Caller() as maker, Caller() as mortal:
        for caller, name in ((maker, "living"), (mortal, "mortal")):
            fd = caller.os("open", str(small.path / name), CREATE, 0o644)
            caller.os("write", fd, stamped(name, SIZE))
            caller.os("close", fd)
            assert state(small.path / name) == "leased"
        fd = maker.os("open", str(small.path / "slab"), CREATE, 0o644)
        maker.os("posix_fallocate", fd, 0, SIZE)
        maker.os("close", fd)
        assert state(small.path / "slab") == "slab"
        states = small.status()["states"]
        assert states["leased"]["blocks"] == 2
        assert states["slab"] == {"blocks": 1, "bytes": SIZE}
        small.stop()
        mortal.close()
        small.start()
        until(lambda: state(small.path / "mortal") == "published", "of the dead", GONE_WAIT_S)
        assert state(small.path / "living") == "leased"
        assert state(small.path / "slab") == "slab"
        until(lambda: small.status()["states"].get("slab", {}).get("blocks") == 1, "the scan")
        states = small.status()["states"]
        assert states["leased"] == {"blocks": 1, "bytes": SIZE}
    until(lambda: state(small.path / "living") == "published", "of its maker", GONE_WAIT_S)
    until(lambda: state(small.path / "slab") == "orphan_slab", "of its maker", GONE_WAIT_S)
    states = small.status()["states"]
    assert "leased" not in states
    assert states["published"]["blocks"] == 2
    assert states["orphan_slab"]["blocks"] == 1
    for name in ("living", "mortal"):
        assert read_file(small.path / name) == stamped(name, SIZE)
