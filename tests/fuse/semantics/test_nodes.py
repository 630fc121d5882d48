"""Removing names, and the kinds of files that are no blocks."""

import os
import socket
import stat
from errno import EEXIST, EINVAL, EISDIR, ENAMETOOLONG, ENOENT, ENOTDIR, EPERM
from pathlib import Path

import pytest

from tests.support.clients.callers import Caller
from tests.support.kernel.calls import opened, read_file, refused, write_file
from tests.support.mounts.mounting import Mounted, Reference

pytestmark = pytest.mark.one_data_path


def test_unlink(kv: Path) -> None:
    """[unlink] The name is gone at once for everybody; directories and absent names refuse."""
    (kv / "d").mkdir()
    write_file(kv / "file", b"content")
    before = os.stat(kv)
    with Caller() as elsewhere:
        assert elsewhere.os("stat", str(kv / "file")).st_size == 7
        os.unlink(kv / "file")
        with refused(ENOENT):
            elsewhere.os("stat", str(kv / "file"))
    after = os.stat(kv)
    assert after.st_mtime_ns > before.st_mtime_ns
    assert after.st_ctime_ns > before.st_ctime_ns
    for name, number in (("file", ENOENT), ("d", EISDIR), ("d/absent", ENOENT)):
        with refused(number):
            os.unlink(kv / name)
    write_file(kv / "file", b"again")
    with refused(ENOTDIR):
        os.unlink(kv / "file" / "below")
    with refused(ENOTDIR):
        os.unlink(f"{kv}/file/")
    assert read_file(kv / "file") == b"again"


@pytest.mark.usefixtures("kvfs_only")
def test_unlinking_gives_the_blocks_back(kv: Path) -> None:
    """[unlink] statfs shows it at once (XFS takes its time)."""
    size = 16 << 20
    free_before = os.statvfs(kv).f_bavail
    with opened(kv / "file", os.O_CREAT | os.O_RDWR) as fd:
        os.write(fd, b"\1" * size)
    held = os.statvfs(kv).f_bavail
    assert (free_before - held) * 4096 >= size * 0.9
    os.unlink(kv / "file")
    assert (os.statvfs(kv).f_bavail - held) * 4096 >= size * 0.9


def test_an_unlinked_open_file_lives_on(kv: Path) -> None:
    """[unlink-open] Read, written, truncated, extended; the name is free meanwhile."""
    write_file(kv / "file", b"old content")
    with opened(kv / "file", os.O_RDWR) as fd, opened(kv / "file", os.O_RDONLY) as reader:
        os.unlink(kv / "file")
        write_file(kv / "file", b"new")
        assert os.pread(fd, 100, 0) == b"old content"
        os.pwrite(fd, b"OLD", 0)
        os.pwrite(fd, b"!", 1 << 20)
        assert os.pread(reader, 11, 0) == b"OLD content"
        assert os.fstat(reader).st_size == (1 << 20) + 1
        os.ftruncate(fd, 3)
        os.fchmod(fd, 0o600)
        os.utime(fd, (1, 1))
        assert os.pread(reader, 100, 0) == b"OLD"
        with opened(f"/proc/self/fd/{fd}", os.O_RDONLY) as again:
            assert os.read(again, 100) == b"OLD"
    assert read_file(kv / "file") == b"new"


def test_a_replaced_open_file_lives_on(kv: Path) -> None:
    """[unlink-open] A writer of the replaced file harms nobody."""
    write_file(kv / "file", b"old content")
    with opened(kv / "file", os.O_RDWR) as fd:
        write_file(kv / "tmp", b"new content")
        os.rename(kv / "tmp", kv / "file")
        os.pwrite(fd, b"XXX", 0)
        assert os.pread(fd, 100, 0) == b"XXX content"
    assert read_file(kv / "file") == b"new content"


def test_files_that_are_created_and_unlinked_at_once(kv: Path) -> None:
    """[unlink-open] What KVBM does: a nameless file for the life of a process."""
    descriptors = []
    try:
        for number in range(20):
            descriptors.append(os.open(kv / "same", os.O_CREAT | os.O_EXCL | os.O_RDWR))
            os.unlink(kv / "same")
            os.pwrite(descriptors[-1], b"%d" % number, 5_000)
        assert os.listdir(kv) == []
        for number, fd in enumerate(descriptors):
            assert os.pread(fd, 100, 5_000) == b"%d" % number
    finally:
        for fd in descriptors:
            os.close(fd)


@pytest.mark.parametrize("size", [1, 59, 60, 255, 1023, 4000, 4095])
def test_symlinks_of_every_length(kv: Path, size: int, mounted: Mounted | Reference) -> None:
    """[symlinks] Kept as given, to 4095 bytes (1023 on XFS)."""
    if isinstance(mounted, Reference) and size > 1023:
        pytest.skip("XFS stores 1023 bytes")
    target = (b"\xff/" * size)[:size]
    os.symlink(target, os.fsencode(kv) + b"/link")
    assert os.readlink(os.fsencode(kv) + b"/link") == target
    assert os.lstat(kv / "link").st_size == size


def test_symlinks_are_followed_and_refused(kv: Path) -> None:
    """[symlinks] Relative, absolute, to directories; EEXIST, ENAMETOOLONG, EINVAL, ENOENT."""
    (kv / "d").mkdir()
    write_file(kv / "d" / "file", b"content")
    os.symlink("d", kv / "relative")
    os.symlink(kv / "d", kv / "absolute")
    assert read_file(kv / "relative" / "file") == b"content"
    assert read_file(kv / "absolute" / "file") == b"content"
    assert stat.S_IMODE(os.lstat(kv / "relative").st_mode) == 0o777
    with refused(EEXIST):
        os.symlink("x", kv / "relative")
    with refused(ENAMETOOLONG):
        os.symlink("x" * 4096, kv / "long")
    with refused(ENOENT):
        os.symlink("", kv / "empty")
    with refused(EINVAL):
        os.readlink(kv / "d")
    os.unlink(kv / "relative")
    assert os.path.isdir(kv / "d")


@pytest.mark.usefixtures("kvfs_only")
@pytest.mark.parametrize("kind", [stat.S_IFCHR, stat.S_IFBLK])
def test_device_nodes_are_refused(kv: Path, kind: int) -> None:
    """[device-nodes] EPERM even for root."""
    with refused(EPERM):
        os.mknod(kv / "node", kind | 0o600, os.makedev(1, 3))
    assert os.listdir(kv) == []


def test_fifos_and_sockets(kv: Path, mounted: Mounted | Reference) -> None:
    """[fifos-sockets] A FIFO carries bytes, a socket is bound and connected, both stay."""
    os.mkfifo(kv / "fifo", 0o640)
    assert stat.S_ISFIFO(os.stat(kv / "fifo").st_mode)
    with (
        opened(kv / "fifo", os.O_RDONLY | os.O_NONBLOCK) as reader,
        opened(kv / "fifo", os.O_WRONLY) as writer,
    ):
        os.write(writer, b"through")
        assert os.read(reader, 100) == b"through"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        with opened(kv, os.O_PATH) as directory:
            server.bind(f"/proc/self/fd/{directory}/socket")
            server.listen()
            client.connect(f"/proc/self/fd/{directory}/socket")
        accepted, _ = server.accept()
        with accepted:
            client.sendall(b"hello")
            assert accepted.recv(100) == b"hello"
    mounted.remount()
    assert stat.S_ISSOCK(os.stat(kv / "socket").st_mode)
    assert stat.S_ISFIFO(os.stat(kv / "fifo").st_mode)
    os.unlink(kv / "socket")
    os.unlink(kv / "fifo")


def test_mknod_makes_regular_files(kv: Path) -> None:
    """[fifos-sockets] As NFS servers do it; EEXIST for a name that is there."""
    os.mknod(kv / "file", stat.S_IFREG | 0o644)
    assert os.stat(kv / "file").st_size == 0
    with refused(EEXIST):
        os.mknod(kv / "file", stat.S_IFREG | 0o644)
    with opened(kv / "file", os.O_RDWR) as fd:
        os.write(fd, b"content")
    assert read_file(kv / "file") == b"content"
