"""The mount as a whole: numbers, options, remounts, a killed server, a full pool."""

import contextlib
import os
import stat
from collections.abc import Iterator
from errno import EACCES, ENOENT, ENOSPC, ENOTCONN, EROFS
from pathlib import Path

import pytest

from tests.support.clients.callers import Caller
from tests.support.kernel.calls import (
    RENAME_EXCHANGE,
    fallocate,
    opened,
    read_file,
    refused,
    renameat2,
    write_file,
)
from tests.support.mounts.mounting import Mounted, Reference, skip_without_mounts, workplace

MIB = 1 << 20
SMALL_BYTES = 64 * MIB


@pytest.fixture
def places() -> Iterator[tuple[Path, Path]]:
    """A blank source and a mountpoint, for tests that need a mount of their own."""
    skip_without_mounts()
    with workplace() as memory, workplace("disk") as disk:
        (memory / "pool").mkdir()
        yield memory / "pool", disk / "kv"


@pytest.mark.usefixtures("kvfs_only")
def test_statfs(kv: Path) -> None:
    """[statfs] Units of 4096, names of 255, totals that stay while free space follows the bytes."""
    before = os.statvfs(kv)
    assert (before.f_bsize, before.f_frsize, before.f_namemax) == (4096, 4096, 255)
    assert before.f_bavail <= before.f_bfree <= before.f_blocks
    assert 0 < before.f_favail <= before.f_files
    write_file(kv / "file", b"\1" * 32 * MIB)
    held = os.statvfs(kv)
    assert held.f_blocks == before.f_blocks
    assert held.f_files == before.f_files
    assert 0.9 * 32 * MIB <= (before.f_bavail - held.f_bavail) * 4096 <= 1.5 * 32 * MIB
    os.unlink(kv / "file")
    after = os.statvfs(kv)
    assert after.f_blocks == before.f_blocks
    assert (after.f_bavail - held.f_bavail) * 4096 >= 0.9 * 32 * MIB


def test_statfs_counts_inodes(kv: Path, mount: Mounted) -> None:
    """[statfs] Free inodes fall by one a file, and status counts the blocks."""
    before = os.statvfs(kv)
    blocks = mount.status()["blocks"]
    for number in range(20):
        write_file(kv / f"{number}", b"x")
    assert mount.status()["blocks"] == blocks + 20
    assert os.statvfs(kv).f_files == before.f_files
    assert before.f_ffree - os.statvfs(kv).f_ffree >= 20


def test_root_options(places: tuple[Path, Path]) -> None:
    """[root-options] Owner and mode as asked, so that the owner may write; kept by a remount."""
    source, mountpoint = places
    with Mounted(source, mountpoint, "-o", "uid=1234,gid=4321,mode=0750") as mounted:
        info = os.stat(mountpoint)
        assert (info.st_uid, info.st_gid) == (1234, 4321)
        assert stat.S_IMODE(info.st_mode) == 0o750
        with Caller(1234, 1) as owner, Caller(1, 1) as stranger:
            owner.os("mkdir", f"{mountpoint}/d")
            with refused(EACCES):
                stranger.os("listdir", str(mountpoint))
        mounted.flags = ()
        mounted.remount()
        assert os.stat(mountpoint).st_uid == 1234
        os.chown(mountpoint, 7, 8)
        os.chmod(mountpoint, 0o711)
        mounted.remount()
        assert os.stat(mountpoint).st_uid == 7
        assert stat.S_IMODE(os.stat(mountpoint).st_mode) == 0o711


def test_a_read_only_mount(places: tuple[Path, Path]) -> None:
    """[read-only] All reading works, all changing is EROFS, and nothing changes."""
    source, mountpoint = places
    with Mounted(source, mountpoint) as mounted:
        (mountpoint / "d").mkdir()
        write_file(mountpoint / "file", b"content")
        os.setxattr(mountpoint / "file", "user.a", b"1")
        os.symlink("file", mountpoint / "link")
        mounted.remount("-o", "ro")
        assert read_file(mountpoint / "link") == b"content"
        assert sorted(os.listdir(mountpoint)) == ["d", "file", "link"]
        assert os.getxattr(mountpoint / "file", "user.a") == b"1"
        assert os.statvfs(mountpoint).f_flag & os.ST_RDONLY
        file, new = mountpoint / "file", mountpoint / "new"
        changes = [
            lambda: os.open(file, os.O_WRONLY),
            lambda: os.open(file, os.O_RDONLY | os.O_TRUNC),
            lambda: os.open(new, os.O_CREAT | os.O_RDONLY, 0o600),
            lambda: os.mkdir(new),
            lambda: os.rmdir(mountpoint / "d"),
            lambda: os.unlink(file),
            lambda: os.symlink("x", new),
            lambda: os.mkfifo(new),
            lambda: os.rename(file, new),
            lambda: renameat2(file, mountpoint / "link", RENAME_EXCHANGE),
            lambda: os.chmod(file, 0o600),
            lambda: os.chown(file, 1, 1),
            lambda: os.utime(file),
            lambda: os.truncate(file, 0),
            lambda: os.setxattr(file, "user.b", b"1"),
            lambda: os.removexattr(file, "user.a"),
        ]
        for change in changes:
            with refused(EROFS):
                change()
        assert not os.access(file, os.W_OK)
        mounted.remount()
        write_file(mountpoint / "new", b"writable again")


def tree_of(root: Path) -> dict[str, tuple[object, ...]]:
    """Return all that a remount must keep, by relative path."""
    tree: dict[str, tuple[object, ...]] = {}
    for path in sorted(root.rglob("*")):
        info = os.lstat(path)
        content: object = None
        if stat.S_ISREG(info.st_mode):
            content = read_file(path)
        elif stat.S_ISLNK(info.st_mode):
            content = os.readlink(path)
        fields = (info.st_mode, info.st_ino, info.st_uid, info.st_gid, info.st_nlink)
        times = (info.st_atime_ns, info.st_mtime_ns, info.st_ctime_ns)
        size = 0 if stat.S_ISDIR(info.st_mode) else info.st_size
        attributes = [
            (name, os.getxattr(path, name, follow_symlinks=False))
            for name in sorted(os.listxattr(path, follow_symlinks=False))
        ]
        tree[str(path.relative_to(root))] = (fields, times, size, content, attributes)
    return tree


def fill_tree(root: Path) -> None:
    """Make some of everything below *root*."""
    for number in range(30):
        directory = root / f"d{number % 3}" / f"e{number % 5}"
        directory.mkdir(parents=True, exist_ok=True)
        write_file(directory / f"f{number}", bytes([number]) * (number * 5_003))
        os.chmod(directory / f"f{number}", 0o600 + number)
        os.chown(directory / f"f{number}", number, number + 1)
        os.utime(directory / f"f{number}", ns=(number, number * 1_000_000_007))
        os.setxattr(directory / f"f{number}", "user.number", b"%d" % number)
    os.symlink("d0", root / "link")
    os.mkfifo(root / "fifo")
    os.truncate(root / "d0" / "e0" / "f15", 1 << 33)
    os.truncate(root / "d0" / "e0" / "f15", 100)
    os.rename(root / "d1", root / "moved")
    os.unlink(root / "d2" / "e2" / "f2")


def test_a_remount_keeps_everything(kv: Path, mounted: Mounted | Reference) -> None:
    """[remount] A tree of every kind is the same before and after, twice, and while changing on."""
    fill_tree(kv)
    os.chmod(kv, 0o750)
    kept = tree_of(kv)
    assert len(kept) > 40
    mounted.remount()
    assert tree_of(kv) == kept
    write_file(kv / "more", b"x")
    kept = tree_of(kv)
    mounted.remount()
    assert tree_of(kv) == kept


def test_a_killed_server(places: tuple[Path, Path]) -> None:
    """[killed-daemon] What was published is there under a new server, which takes more."""
    source, mountpoint = places
    with Mounted(source, mountpoint) as mounted:
        fill_tree(mountpoint)
        kept = tree_of(mountpoint)
        for _ in range(2):
            mounted.kill_daemon()
            mounted.start()
            assert tree_of(mountpoint) == kept
            write_file(mountpoint / "after", b"killed")
            assert read_file(mountpoint / "after") == b"killed"
            kept = tree_of(mountpoint)


def test_a_killed_server_fails_calls_at_once(places: tuple[Path, Path]) -> None:
    """[killed-daemon] Without a server nothing hangs: calls on the old mount are ENOTCONN."""
    source, mountpoint = places
    with Mounted(source, mountpoint) as mounted:
        write_file(mountpoint / "tmp", b"content")
        os.rename(mountpoint / "tmp", mountpoint / "file")
        with opened(mountpoint, os.O_PATH) as old:
            mounted.kill_daemon()
            with refused(ENOTCONN):
                os.stat("absent", dir_fd=old)
        mounted.start()
        assert read_file(mountpoint / "file") == b"content"


def test_a_writer_that_outlives_its_server(places: tuple[Path, Path]) -> None:
    """[killed-daemon] By passthrough it may write on: not into what the next server shows."""
    source, mountpoint = places
    content = b"1" * 65536
    with Mounted(source, mountpoint) as mounted:
        write_file(mountpoint / "file", content)
        fd = os.open(mountpoint / "file", os.O_RDWR)
        try:
            mounted.kill_daemon()
            mounted.start()
            with contextlib.suppress(OSError):
                os.pwrite(fd, b"2" * 4096, 0)
            names = os.listdir(mountpoint)
            assert [read_file(mountpoint / name) for name in names] in ([], [content])
        finally:
            with contextlib.suppress(OSError):
                os.close(fd)  # its FLUSH has no server


def test_a_full_pool(places: tuple[Path, Path]) -> None:
    """[capacity] ENOSPC when the capacity is reached, room at once after a removal."""
    source, mountpoint = places
    with Mounted(source, mountpoint, f"--capacity={SMALL_BYTES}") as mounted:
        assert mounted.status()["capacity_bytes"] == SMALL_BYTES
        assert os.statvfs(mountpoint).f_blocks * 4096 == SMALL_BYTES
        stored = 0
        with refused(ENOSPC):
            for number in range(1000):
                write_file(mountpoint / f"{number}", bytes([number % 251]) * MIB)
                stored += 1
        assert 0.8 * SMALL_BYTES <= stored * MIB <= SMALL_BYTES
        assert mounted.status()["used_bytes"] <= SMALL_BYTES
        for _ in range(3):
            os.unlink(mountpoint / "0")
            write_file(mountpoint / "0", b"\1" * MIB)
        for number in range(1, stored):
            assert read_file(mountpoint / f"{number}") == bytes([number % 251]) * MIB
        for number in range(stored):
            os.unlink(mountpoint / f"{number}")
        assert mounted.status()["used_bytes"] <= MIB


def test_a_huge_file_in_a_small_pool(places: tuple[Path, Path]) -> None:
    """[truncate-huge] 1 PiB and a byte at its end in a pool of 64 MiB, and room for the rest."""
    source, mountpoint = places
    with Mounted(source, mountpoint, f"--capacity={SMALL_BYTES}") as mounted:
        with opened(mountpoint / "huge", os.O_CREAT | os.O_RDWR) as fd:
            os.ftruncate(fd, 1 << 50)
            os.pwrite(fd, b"x", (1 << 50) - 1)
        assert os.stat(mountpoint / "huge").st_size == 1 << 50
        write_file(mountpoint / "rest", b"\1" * (SMALL_BYTES // 2))
        assert SMALL_BYTES // 2 <= mounted.status()["used_bytes"] <= SMALL_BYTES // 2 + MIB
        with opened(mountpoint / "reserve", os.O_CREAT | os.O_RDWR) as fd:
            with refused(ENOSPC):
                fallocate(fd, 0, 0, SMALL_BYTES)
            fallocate(fd, 0, 0, SMALL_BYTES // 4)


@pytest.mark.parametrize(("how", "least", "most"), [("relaxed", 0, 1), ("honour", 20, 20)])
def test_what_an_fsync_costs(places: tuple[Path, Path], how: str, least: int, most: int) -> None:
    """[fsync] Relaxed the server is asked once, and never again; with honour every time."""
    source, mountpoint = places
    with (
        Mounted(source, mountpoint, f"--fsync={how}") as mounted,
        opened(mountpoint / "file", os.O_CREAT | os.O_RDWR) as fd,
    ):
        for _ in range(20):
            assert os.write(fd, b"content") == 7
            os.fsync(fd)
        assert least <= mounted.requests().get("FSYNC", 0) <= most


def test_a_write_into_a_full_pool(places: tuple[Path, Path]) -> None:
    """[write-errors] ENOSPC for that write; the draft goes with its last close, no other."""
    source, mountpoint = places
    with Mounted(source, mountpoint, f"--capacity={SMALL_BYTES}", "--data-path=daemon") as mounted:
        with opened(mountpoint / "file", os.O_CREAT | os.O_RDWR) as fd:
            written = 0
            with refused(ENOSPC):
                while written < 2 * SMALL_BYTES:
                    written += os.pwrite(fd, b"\xaa" * 100_000, written)
            assert written >= 0.8 * SMALL_BYTES
            assert os.fstat(fd).st_size >= written
            assert os.pread(fd, 100, written - 100) == b"\xaa" * 100
            os.pwrite(fd, b"\xbb" * 100, 0)
        with refused(ENOENT):
            read_file(mountpoint / "file")
        write_file(mountpoint / "next", b"\xcc" * 100_000)
        assert read_file(mountpoint / "next") == b"\xcc" * 100_000
        assert mounted.status()["used_bytes"] <= MIB
