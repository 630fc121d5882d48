"""What stat shows, and who may change it."""

import itertools
import os
import stat
import subprocess
import time
from errno import EACCES, EBADF, EPERM
from pathlib import Path

import pytest

from kvfs.pool.open.extent_bytes import stamps_are_exact
from tests.support.clients.callers import Caller
from tests.support.kernel.calls import (
    UTIME_NOW,
    UTIME_OMIT,
    opened,
    read_file,
    refused,
    utimensat,
    write_file,
)
from tests.support.mounts.mounting import Mounted, Reference

SECOND_NS = 1_000_000_000
#: The longest step of the clock that stamps files before Linux 6.13.
STEP_MAX_NS = 10_000_000
IMODE = stat.S_IMODE


def test_what_stat_shows(kv: Path) -> None:
    """[stat] Kinds, sizes, link counts and the unit of I/O."""
    write_file(kv / "file", b"12345")
    os.symlink("some target", kv / "link")
    for number in range(3):
        (kv / f"sub{number}").mkdir()
    info = os.stat(kv / "file")
    assert stat.S_ISREG(info.st_mode)
    assert (info.st_nlink, info.st_size, info.st_blksize) == (1, 5, 4096)
    assert os.lstat(kv / "link").st_size == len("some target")
    assert os.stat(kv / "file").st_dev == os.stat(kv).st_dev
    with opened(kv / "file", os.O_RDONLY) as fd:
        assert os.fstat(fd) == os.stat(kv / "file")


def test_link_counts_of_directories(kv: Path) -> None:
    """[stat] Two and one for each subdirectory, through every way they come and go."""
    assert os.stat(kv).st_nlink == 2
    (kv / "a").mkdir()
    (kv / "b").mkdir()
    write_file(kv / "file", b"")
    assert os.stat(kv).st_nlink == 4
    os.rename(kv / "a", kv / "b" / "a")
    assert (os.stat(kv).st_nlink, os.stat(kv / "b").st_nlink) == (3, 3)
    (kv / "c").mkdir()
    os.rename(kv / "b" / "a", kv / "c")
    assert (os.stat(kv).st_nlink, os.stat(kv / "b").st_nlink) == (4, 2)
    os.rmdir(kv / "c")
    assert os.stat(kv).st_nlink == 3


def test_an_unlinked_open_file_has_no_links(kv: Path) -> None:
    """[stat] nlink 0 by descriptor, for files removed and for files replaced."""
    write_file(kv / "file", b"a")
    write_file(kv / "replaced", b"b")
    with (
        opened(kv / "file", os.O_RDWR) as gone,
        opened(kv / "replaced", os.O_RDONLY) as replaced,
    ):
        os.rename(kv / "file", kv / "replaced")
        assert os.fstat(replaced).st_nlink == 0
        assert os.fstat(gone).st_nlink == 1
        os.unlink(kv / "replaced")
        assert os.fstat(gone).st_nlink == 0
        assert os.fstat(gone).st_size == 1


def test_which_changes_advance_which_times(kv: Path) -> None:
    """[times] A table of calls against mtime and ctime of the file and of its directory."""
    directory = kv / "d"
    directory.mkdir()
    path = directory / "file"
    write_file(path, b"content")
    os.mkdir(kv / "elsewhere")
    table = [
        (lambda: os.chmod(path, 0o600), "file-c"),
        (lambda: os.chown(path, 12, 13), "file-c"),
        (lambda: os.truncate(path, 3), "file-mc"),
        (lambda: write_file(path, b"new"), "file-mc"),
        (lambda: os.setxattr(path, "user.a", b"1"), "file-c"),
        (lambda: os.removexattr(path, "user.a"), "file-c"),
        (lambda: os.utime(path, (5, 5)), "file-c"),
        (lambda: write_file(directory / "other", b""), "dir-mc"),
        (lambda: os.mkdir(directory / "sub"), "dir-mc"),
        (lambda: os.rmdir(directory / "sub"), "dir-mc"),
        (lambda: os.symlink("x", directory / "link"), "dir-mc"),
        (lambda: os.unlink(directory / "link"), "dir-mc"),
        (lambda: os.rename(directory / "other", kv / "elsewhere" / "other"), "dir-mc"),
        (lambda: os.rename(kv / "elsewhere" / "other", directory / "other"), "dir-mc"),
        (lambda: os.rename(directory / "other", directory / "another"), "dir-mc"),
        (lambda: os.chmod(directory, 0o711), "dir-c"),
    ]
    for number, (call, changes) in enumerate(table):
        target, which = changes.split("-")
        watched = path if target == "file" else directory
        before = os.stat(watched)
        call()
        after = os.stat(watched)
        where = f"row {number}: {changes}"
        assert (after.st_mtime_ns != before.st_mtime_ns) == ("m" in which or number == 6), where
        assert after.st_ctime_ns > before.st_ctime_ns, where


def test_times_follow_the_hosts_clock(kv: Path) -> None:
    """[times] Between two looks at the clock, with nanoseconds."""
    slack_ns = 20_000_000
    begin = time.time_ns() - slack_ns
    write_file(kv / "file", b"x")
    end = time.time_ns() + slack_ns
    info = os.stat(kv / "file")
    for stamp in (info.st_atime_ns, info.st_mtime_ns, info.st_ctime_ns):
        assert begin <= stamp <= end


def test_a_write_shows_its_time_at_once(kv: Path) -> None:
    """[times] mtime by another process right after a write, the file still open."""
    write_file(kv / "file", b"x")
    os.utime(kv / "file", (1, 1))
    with opened(kv / "file", os.O_WRONLY) as fd, Caller() as elsewhere:
        assert elsewhere.os("stat", str(kv / "file")).st_mtime == 1
        os.write(fd, b"y")
        assert elsewhere.os("stat", str(kv / "file")).st_mtime > 1
        assert os.fstat(fd).st_mtime > 1


def birth_ns(path: Path) -> int:
    """Return what statx(2) tells; Python has no call for it. 0: nothing."""
    told = subprocess.run(
        ["stat", "--format=%.9W", path], check=True, capture_output=True, text=True
    ).stdout
    seconds, _, rest = told.strip().partition(".")
    return int(seconds) * SECOND_NS + int(rest or "0")


def test_a_file_tells_when_it_was_created(kv: Path) -> None:
    """[birth-time] Neither a write, nor times that are set, nor another name change it."""
    (kv / "d").mkdir()
    before_ns = os.stat(kv / "d").st_mtime_ns
    write_file(kv / "file", b"content")
    born_ns = birth_ns(kv / "file")
    assert before_ns <= born_ns <= os.stat(kv / "file").st_ctime_ns
    os.utime(kv / "file", (1000, 2000))
    with open(kv / "file", "ab") as file:
        file.write(b" and more")
    os.rename(kv / "file", kv / "d" / "moved")
    assert birth_ns(kv / "d" / "moved") == born_ns
    assert os.stat(kv / "d" / "moved").st_size == len(b"content and more")


@pytest.mark.usefixtures("kvfs_only")
def test_reading_leaves_atime(kv: Path) -> None:
    """[atime] Reads, mappings and listings do not touch it; utimens does."""
    write_file(kv / "file", b"content")
    (kv / "d").mkdir()
    os.utime(kv / "file", (1000, 2000))
    os.utime(kv / "d", (1000, 2000))
    assert read_file(kv / "file") == b"content"
    os.listdir(kv / "d")
    assert os.stat(kv / "file").st_atime == 1000
    assert os.stat(kv / "d").st_atime == 1000
    os.utime(kv / "file", (3000, 2000))
    assert os.stat(kv / "file").st_atime == 3000


@pytest.mark.parametrize(
    "stamp_ns", [0, 1, 999_999_999, 1_234_567_890_123_456_789, -1, -86_400 * SECOND_NS + 5]
)
def test_times_to_the_nanosecond(kv: Path, stamp_ns: int, mounted: Mounted | Reference) -> None:
    """[utimens] For files, directories and symlinks; before 1970; kept over a remount."""
    write_file(kv / "file", b"")
    (kv / "d").mkdir()
    os.symlink("file", kv / "link")
    for name in ("file", "d", "link"):
        os.utime(kv / name, ns=(stamp_ns + 1, stamp_ns), follow_symlinks=False)
    for _ in range(2):
        for name in ("file", "d", "link"):
            info = os.lstat(kv / name)
            assert (info.st_atime_ns, info.st_mtime_ns) == (stamp_ns + 1, stamp_ns)
        if stamp_ns != 1_234_567_890_123_456_789:
            break
        mounted.remount()


def test_now_and_omit(kv: Path) -> None:
    """[utimens] Each of the two times may be the present one or left alone."""
    path = kv / "file"
    write_file(path, b"")
    utimensat(path, (10, 20), (30, 40))
    info = os.stat(path)
    assert (info.st_atime_ns, info.st_mtime_ns) == (10 * SECOND_NS + 20, 30 * SECOND_NS + 40)
    utimensat(path, (0, UTIME_OMIT), (50, 60))
    info = os.stat(path)
    assert (info.st_atime_ns, info.st_mtime_ns) == (10 * SECOND_NS + 20, 50 * SECOND_NS + 60)
    utimensat(path, (70, 80), (0, UTIME_OMIT))
    info = os.stat(path)
    assert (info.st_atime_ns, info.st_mtime_ns) == (70 * SECOND_NS + 80, 50 * SECOND_NS + 60)
    begin = time.time() - 1
    utimensat(path, (0, UTIME_NOW), (0, UTIME_OMIT))
    info = os.stat(path)
    assert begin <= info.st_atime <= time.time() + 1
    assert info.st_mtime_ns == 50 * SECOND_NS + 60
    with opened(path, os.O_RDWR) as fd:
        os.utime(fd, ns=(5, 6))
        assert os.fstat(fd).st_mtime_ns == 6


def test_a_set_time_survives_close(kv: Path) -> None:
    """[utimens] As cp -p does it: write, set the times, close; closing changes nothing."""
    with opened(kv / "file", os.O_CREAT | os.O_WRONLY) as fd:
        os.write(fd, b"content")
        os.utime(fd, ns=(111, 222))
    assert os.stat(kv / "file").st_mtime_ns == 222
    with opened(kv / "file", os.O_RDONLY) as fd:
        os.read(fd, 10)
    assert os.stat(kv / "file").st_mtime_ns == 222


def test_who_may_set_times(kv: Path, nobody: Caller, other: Caller) -> None:
    """[utimens] The owner anything; who may write the present time; others nothing."""
    path = str(kv / "file")
    write_file(path, b"")
    os.chown(path, nobody.uid, nobody.gid)
    os.chmod(path, 0o646)
    nobody.os("utime", path, (5, 5))
    assert os.stat(path).st_mtime == 5
    other.os("utime", path)
    assert os.stat(path).st_mtime > 5
    with refused(EPERM):
        other.os("utime", path, (5, 5))
    os.chmod(path, 0o644)
    with refused(EACCES):
        other.os("utime", path)


def test_modes(kv: Path, nobody: Caller, other: Caller) -> None:
    """[chmod] The owner sets the bits, by path and descriptor; others may not."""
    path = str(kv / "file")
    write_file(path, b"")
    os.chown(path, nobody.uid, nobody.gid)
    for mode in (0o777, 0o000, 0o123, 0o644):
        nobody.os("chmod", path, mode)
        assert IMODE(os.stat(path).st_mode) == mode
    with opened(path, os.O_RDONLY) as fd:
        os.fchmod(fd, 0o640)
        assert IMODE(os.fstat(fd).st_mode) == 0o640
    with opened(path, os.O_PATH) as fd, refused(EBADF):
        os.fchmod(fd, 0o600)
    with refused(EPERM):
        other.os("chmod", path, 0o777)
    (kv / "d").mkdir()
    for mode in (0o2755, 0o1777, 0o3700, 0o755):
        os.chmod(kv / "d", mode)
        assert IMODE(os.stat(kv / "d").st_mode) == mode
    assert stat.S_ISDIR(os.stat(kv / "d").st_mode)


@pytest.mark.usefixtures("kvfs_only")
def test_special_bits_of_files_are_dropped(kv: Path, mounted: Mounted) -> None:
    """[chmod-special] Accepted, not stored, by chmod, open and mknod; and the mount is nosuid."""
    write_file(kv / "file", b"")
    os.chmod(kv / "file", 0o6755)
    assert IMODE(os.stat(kv / "file").st_mode) == 0o755
    os.chmod(kv / "file", 0o7700)
    assert IMODE(os.stat(kv / "file").st_mode) == 0o1700
    with opened(kv / "made", os.O_CREAT | os.O_WRONLY, 0o6711) as fd:
        assert IMODE(os.fstat(fd).st_mode) == 0o711
    os.mknod(kv / "node", stat.S_IFREG | 0o4700)
    assert IMODE(os.stat(kv / "node").st_mode) == 0o700
    flags = os.statvfs(kv).f_flag
    assert flags & os.ST_NOSUID
    assert flags & os.ST_NODEV


def test_owners(kv: Path, nobody: Caller) -> None:
    """[chown] Root anything, the owner its own groups, -1 leaves; ctime advances."""
    path = str(kv / "file")
    write_file(path, b"")
    os.chown(path, 123, 456)
    assert (os.stat(path).st_uid, os.stat(path).st_gid) == (123, 456)
    os.chown(path, -1, 789)
    assert (os.stat(path).st_uid, os.stat(path).st_gid) == (123, 789)
    os.chown(path, 4_000_000_000, -1)
    assert (os.stat(path).st_uid, os.stat(path).st_gid) == (4_000_000_000, 789)
    with opened(path, os.O_RDONLY) as fd:
        os.fchown(fd, nobody.uid, nobody.gid)
    with refused(EPERM):
        nobody.os("chown", path, 0, -1)
    with refused(EPERM):
        nobody.os("chown", path, -1, 0)
    with Caller(nobody.uid, nobody.gid, groups=[77]) as member:
        member.os("chown", path, -1, 77)
    assert (os.stat(path).st_uid, os.stat(path).st_gid) == (nobody.uid, 77)
    os.symlink("file", kv / "link")
    os.lchown(kv / "link", 5, 6)
    assert (os.lstat(kv / "link").st_uid, os.stat(path).st_uid) == (5, nobody.uid)


def test_times_of_different_files_are_in_the_order_of_what_was_done(kv: Path) -> None:
    """[times] Whatever stamps them: a creation, the present time, a write, a directory's names."""
    stamps: list[int] = []
    for turn in range(40):
        touched, written, made = (kv / f"{kind}{turn}" for kind in ("touched", "written", "made"))
        touched.touch()
        stamps.append(touched.stat().st_mtime_ns)
        write_file(written, b"x")
        stamps.append(written.stat().st_mtime_ns)
        made.mkdir()
        stamps.append(made.stat().st_ctime_ns)
        os.utime(touched)
        stamps.append(touched.stat().st_mtime_ns)
        touched.chmod(0o600)
        stamps.append(touched.stat().st_ctime_ns)
        os.rename(touched, made / "renamed")
        stamps.append(made.stat().st_mtime_ns)
    later = [b - a for a, b in itertools.pairwise(stamps)]
    assert min(later) >= (0 if stamps_are_exact() else -STEP_MAX_NS), later
