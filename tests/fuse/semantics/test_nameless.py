"""O_TMPFILE: a file without a name, which linkat(2) gives one when it is whole."""

import os
import signal
import stat
import tempfile
from collections.abc import Callable, Iterator
from errno import EEXIST, ENOENT, EPERM
from pathlib import Path

import pytest

from tests.support.clients.callers import Caller
from tests.support.clients.stepping import until
from tests.support.kernel.calls import linkat, opened, read_file, refused, write_file
from tests.support.mounts.mounting import Mounted, own_tmpfs, skip_without_mounts, workplace

BLOCK = b"block" * 5000
NAMELESS = os.O_TMPFILE | os.O_RDWR


def by_its_path(fd: int, new: Path) -> None:
    """The way of who has no privilege: AT_SYMLINK_FOLLOW, which Python sets beside a *_dir_fd*."""
    os.link(f"/proc/self/fd/{fd}", new, src_dir_fd=fd, follow_symlinks=True)


@pytest.mark.parametrize("give_name", [linkat, by_its_path])
def test_a_link_publishes_it(kv: Path, give_name: Callable[[int, Path], None]) -> None:
    """[open-tmpfile] Nobody sees it before, and all of it after."""
    (kv / "d").mkdir()
    with opened(kv, NAMELESS, 0o640) as fd:
        os.write(fd, BLOCK)
        os.fsync(fd)
        info = os.fstat(fd)
        assert (info.st_nlink, info.st_size, stat.S_IMODE(info.st_mode)) == (0, len(BLOCK), 0o640)
        assert os.pread(fd, len(BLOCK), 0) == BLOCK
        assert os.listdir(kv) == ["d"]
        give_name(fd, kv / "d" / "K")
        assert os.fstat(fd).st_nlink == 1
        assert os.fstat(fd).st_ino == os.stat(kv / "d" / "K").st_ino
        assert read_file(kv / "d" / "K") == BLOCK
    assert os.listdir(kv) == ["d"]
    assert read_file(kv / "d" / "K") == BLOCK
    assert os.stat(kv / "d" / "K").st_nlink == 1


def test_what_is_written_after_its_link_is_there(kv: Path) -> None:
    """[open-tmpfile]"""
    with opened(kv, NAMELESS) as fd:
        os.write(fd, BLOCK)
        linkat(fd, kv / "K")
        os.write(fd, b"more")
    assert read_file(kv / "K") == BLOCK + b"more"


def test_it_is_published(kv: Path, kvfs_only: None) -> None:
    """[open-tmpfile]"""
    with opened(kv, NAMELESS) as fd:
        os.write(fd, BLOCK)
        os.setxattr(fd, "user.a", b"b")
        linkat(fd, kv / "K")
        assert os.getxattr(kv / "K", "user.kvfs.state") == b"published"
    assert os.getxattr(kv / "K", "user.kvfs.state") == b"published"
    assert os.getxattr(kv / "K", "user.a") == b"b"
    assert os.stat(kv / "K").st_blocks * 512 >= len(BLOCK)


def test_without_a_link_nothing_is_left(mount: Mounted, kv: Path) -> None:
    """[open-tmpfile] Nor of one whose writer is killed. Python makes temporary files so."""
    with tempfile.TemporaryFile(dir=kv) as file:
        file.write(BLOCK)
        file.seek(0)
        assert file.read() == BLOCK
        assert os.fstat(file.fileno()).st_nlink == 0
        assert os.listdir(kv) == []
    with Caller() as writer:
        fd = writer.os("open", str(kv), NAMELESS, 0o600)
        writer.os("write", fd, BLOCK)
        os.kill(writer.pid, signal.SIGKILL)
    until(lambda: mount.status()["open_handles"] == 0, "the handle is closed")
    assert os.listdir(kv) == []
    # An extent goes some time after its last close.
    until(lambda: "gone" not in mount.status()["states"], "its bytes are gone")


def test_a_name_that_is_there_is_not_replaced(kv: Path) -> None:
    """[open-tmpfile]"""
    write_file(kv / "K", b"first")
    with opened(kv, NAMELESS) as fd:
        os.write(fd, BLOCK)
        with refused(EEXIST):
            linkat(fd, kv / "K")
        linkat(fd, kv / "L")
    assert read_file(kv / "K") == b"first"
    assert read_file(kv / "L") == BLOCK


def test_a_file_that_shall_not_get_a_name_gets_none(kv: Path) -> None:
    """[open-tmpfile] O_EXCL; and one that was unlinked."""
    with opened(kv, NAMELESS | os.O_EXCL) as fd, refused(ENOENT):
        linkat(fd, kv / "K")
    with opened(kv / "old", os.O_RDWR | os.O_CREAT) as fd:
        os.unlink(kv / "old")
        with refused(ENOENT):
            linkat(fd, kv / "K")
    assert os.listdir(kv) == []


def test_it_belongs_to_its_caller(kv: Path, nobody: Caller) -> None:
    """[open-tmpfile] Owner and mode are those of a new file; a setgid directory gives its group."""
    kv.chmod(0o2777)
    os.chown(kv, 0, 4711)
    fd = nobody.os("open", str(kv), NAMELESS, 0o666)
    nobody.os("write", fd, BLOCK)
    nobody.os("link", f"/proc/self/fd/{fd}", str(kv / "K"), src_dir_fd=fd, follow_symlinks=True)
    nobody.os("close", fd)
    info = os.stat(kv / "K")
    assert (info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode)) == (nobody.uid, 4711, 0o644)
    assert read_file(kv / "K") == BLOCK


def test_it_gets_one_name(kv: Path, kvfs_only: None) -> None:
    """[open-tmpfile] It is published then, and a link of that is refused."""
    with opened(kv, NAMELESS) as fd:
        os.write(fd, BLOCK)
        linkat(fd, kv / "K")
        with refused(EPERM):
            linkat(fd, kv / "L")
    assert os.listdir(kv) == ["K"]


@pytest.fixture(params=["daemon", "passthrough"])
def slow_lane(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A mount on which each O_TMPFILE goes the way of one that has to wait."""
    skip_without_mounts()
    flags = (f"--data-path={request.param}", "--set", "fast_lane=false")
    with (
        workplace("disk") as place,
        own_tmpfs() as pool,
        Mounted(str(pool), place / "kv", *flags) as mounted,
    ):
        yield mounted


def test_one_that_has_to_wait_is_made_all_the_same(slow_lane: Mounted, kvfs_only: None) -> None:
    """[open-tmpfile] The kernel would never ask again after an ENOSYS."""
    for number in range(20):
        with opened(slow_lane.path, NAMELESS) as fd:
            os.write(fd, BLOCK)
            assert os.fstat(fd).st_nlink == 0
            if number % 2:
                linkat(fd, slow_lane.path / f"{number}")
    assert len(os.listdir(slow_lane.path)) == 10
    assert all(read_file(slow_lane.path / name) == BLOCK for name in os.listdir(slow_lane.path))
    assert slow_lane.errors() == []
