"""link(2): publishes a block under another name, which it leaves an alias of for a while."""

import os
import signal
from errno import EEXIST, EMLINK, ENOENT, ENOTEMPTY, EPERM
from pathlib import Path

import pytest

from tests.support.clients.callers import Caller
from tests.support.clients.stepping import until
from tests.support.kernel.calls import (
    RENAME_EXCHANGE,
    opened,
    read_file,
    refused,
    renameat2,
    write_file,
)
from tests.support.mounts.mounting import Mounted, Reference, run_kvfs

BLOCK = b"block" * 5000


def links(*paths: Path) -> set[tuple[int, int]]:
    """Return number and links of each of *paths*, by path and by descriptor."""
    found = {(info.st_ino, info.st_nlink) for info in map(os.stat, paths)}
    for path in paths:
        with opened(path, os.O_RDONLY) as fd:
            info = os.fstat(fd)
            found.add((info.st_ino, info.st_nlink))
    return found


def stored(kv: Path, name: str = "K") -> tuple[Path, Path]:
    """Store a block that has two names: return the one that it was created with, and the other."""
    first, second = kv / f"{name}.tmp", kv / name
    write_file(first, BLOCK)
    os.link(first, second)
    return first, second


def test_a_link_publishes(kv: Path) -> None:
    """[hard-links] A store by tmp, link and unlink: two names of one file, and then one."""
    first, second = stored(kv)
    assert len(links(first, second)) == 1
    assert os.stat(second).st_nlink == 2
    assert sorted(os.listdir(kv)) == ["K", "K.tmp"]
    assert {entry.inode() for entry in os.scandir(kv)} == {os.stat(second).st_ino}
    assert read_file(first) == read_file(second) == BLOCK
    os.unlink(first)
    assert os.stat(second).st_nlink == 1
    assert os.listdir(kv) == ["K"]
    assert read_file(second) == BLOCK
    with refused(ENOENT):
        os.stat(first)


def test_its_state_is_published(kv: Path, kvfs_only: None) -> None:
    """[hard-links]"""
    for path in stored(kv):
        assert os.getxattr(path, "user.kvfs.state") == b"published"


def test_a_link_of_an_open_file_goes_on_with_it(kv: Path) -> None:
    """[hard-links] As a rename of it does: what is written after it is there, too."""
    (kv / "d").mkdir()
    with opened(kv / "K.tmp", os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
        os.write(fd, BLOCK)
        os.link(kv / "K.tmp", kv / "d" / "K")
        assert os.fstat(fd).st_nlink == 2
        assert read_file(kv / "d" / "K") == BLOCK
        os.write(fd, b"more")
    assert read_file(kv / "d" / "K") == read_file(kv / "K.tmp") == BLOCK + b"more"
    os.unlink(kv / "K.tmp")
    assert os.stat(kv / "d" / "K").st_nlink == 1


def test_a_name_that_is_there_is_not_replaced(kv: Path) -> None:
    """[hard-links] EEXIST, whatever has the name."""
    write_file(kv / "K.tmp", BLOCK)
    write_file(kv / "K", b"first")
    os.symlink("nowhere", kv / "link")
    (kv / "d").mkdir()
    for name in ("K", "link", "d", "K.tmp"):
        with refused(EEXIST):
            os.link(kv / "K.tmp", kv / name)
    assert read_file(kv / "K") == b"first"
    assert os.stat(kv / "K.tmp").st_nlink == 1
    os.unlink(kv / "K.tmp")


@pytest.mark.parametrize("gone", [0, 1])
def test_the_file_has_the_name_that_is_left(kv: Path, gone: int) -> None:
    """[hard-links] Whichever is unlinked, or renamed over; also for who has it open."""
    names = stored(kv)
    with opened(names[gone], os.O_RDONLY) as fd:
        os.unlink(names[gone])
        assert os.fstat(fd).st_nlink == 1
    assert os.listdir(kv) == [names[1 - gone].name]
    assert read_file(names[1 - gone]) == BLOCK
    names = stored(kv, "L")
    write_file(kv / "other", b"other")
    os.rename(kv / "other", names[gone])
    assert read_file(names[gone]) == b"other"
    assert read_file(names[1 - gone]) == BLOCK
    assert [os.stat(name).st_nlink for name in names] == [1, 1]


def test_either_name_can_be_renamed(kv: Path) -> None:
    """[hard-links] A directory with either is not empty; one renamed to the other stays."""
    first, second = stored(kv)
    os.rename(first, second)
    os.rename(second, first)
    assert sorted(os.listdir(kv)) == ["K", "K.tmp"]
    for name in (first, second):
        (kv / "d").mkdir()
        os.rename(name, kv / "d" / "moved")
        with refused(ENOTEMPTY):
            (kv / "d").rmdir()
        assert read_file(kv / "d" / "moved") == BLOCK
        write_file(kv / "other", b"other")
        renameat2(kv / "other", kv / "d" / "moved", RENAME_EXCHANGE)
        assert read_file(kv / "other") == BLOCK
        os.rename(kv / "other", name)
        os.unlink(kv / "d" / "moved")
        (kv / "d").rmdir()
    assert len(links(first, second)) == 1


def test_both_names_lead_to_what_is_written(kv: Path) -> None:
    """[hard-links] In place, and after O_TRUNC by either name."""
    first, second = stored(kv)
    with opened(first, os.O_WRONLY) as fd:
        os.pwrite(fd, b"BLOCK", 0)
    assert read_file(second) == b"BLOCK" + BLOCK[5:]
    for written, read in ((first, second), (second, first)):
        write_file(written, str(written).encode())
        assert read_file(read) == str(written).encode()
        assert len(links(first, second)) == 1
    os.chmod(first, 0o600)
    assert os.stat(second).st_mode & 0o777 == 0o600


def test_what_is_no_file_is_not_linked(kv: Path, kvfs_only: None) -> None:
    """[hard-links] EPERM."""
    (kv / "d").mkdir()
    os.symlink("nowhere", kv / "link")
    os.mkfifo(kv / "fifo")
    for name in ("d", "link", "fifo"):
        with refused(EPERM):
            os.link(kv / name, kv / "new", follow_symlinks=False)
    assert not (kv / "new").exists()


def test_what_others_may_use_is_not_linked(kv: Path, kvfs_only: None, nobody: Caller) -> None:
    """[hard-links] EPERM for what was renamed, or made by another process."""
    kv.chmod(0o777)
    write_file(kv / "renamed.tmp", BLOCK)
    os.rename(kv / "renamed.tmp", kv / "renamed")
    with Caller() as other:
        other.os("close", other.os("open", str(kv / "others"), os.O_WRONLY | os.O_CREAT, 0o666))
        for name in ("renamed", "others"):
            with refused(EPERM):
                os.link(kv / name, kv / "new")
        with refused(EPERM):
            nobody.os("link", str(kv / "others"), str(kv / "new"))
        other.os("link", str(kv / "others"), str(kv / "new"))
        assert links(kv / "others", kv / "new")
    assert not (kv / "renamed.tmp").exists()


def test_a_third_name_is_refused(kv: Path, kvfs_only: None) -> None:
    """[hard-links] EMLINK."""
    for path in stored(kv):
        with refused(EMLINK):
            os.link(path, kv / "third")
    assert sorted(os.listdir(kv)) == ["K", "K.tmp"]


@pytest.mark.parametrize("how", ["exits", "is killed"])
def test_the_first_name_goes_with_its_linker(kv: Path, kvfs_only: None, how: str) -> None:
    """[hard-links]"""
    with Caller() as linker:
        fd = linker.os("open", str(kv / "K.tmp"), os.O_WRONLY | os.O_CREAT, 0o644)
        linker.os("write", fd, BLOCK)
        linker.os("close", fd)
        linker.os("link", str(kv / "K.tmp"), str(kv / "K"))
        assert os.stat(kv / "K").st_nlink == 2
        assert (kv / "K.tmp").exists()
        if how == "is killed":
            os.kill(linker.pid, signal.SIGKILL)
    until(lambda: not (kv / "K.tmp").exists(), "the first name is gone")
    until(lambda: os.stat(kv / "K").st_nlink == 1, "one name is left")
    assert os.listdir(kv) == ["K"]
    assert read_file(kv / "K") == BLOCK


@pytest.mark.usefixtures("mount")
def test_an_eviction_takes_both_names(kv: Path) -> None:
    """[hard-links]"""
    first, second = stored(kv)
    assert "1 block" in run_kvfs("evict", str(first)).stdout
    for path in (first, second):
        with refused(ENOENT):
            os.stat(path)
    assert os.listdir(kv) == []


def test_both_names_are_there_after_a_remount(own_mounted: Mounted | Reference) -> None:
    """[hard-links] While the linker lives."""
    first, second = stored(own_mounted.path)
    own_mounted.remount()
    assert len(links(first, second)) == 1
    assert os.stat(first).st_nlink == 2
    os.unlink(first)
    own_mounted.remount()
    assert os.listdir(own_mounted.path) == ["K"]
    assert read_file(second) == BLOCK
    os.unlink(second)
