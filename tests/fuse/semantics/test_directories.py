"""Directories: making, removing, listing."""

import os
import stat
import subprocess
import sys
from errno import EBUSY, EEXIST, EINVAL, ENOENT, ENOTDIR, ENOTEMPTY
from pathlib import Path

import pytest

from tests.support.clients.callers import Caller
from tests.support.kernel.calls import (
    getdents,
    list_directory,
    opened,
    read_file,
    refused,
    write_file,
)
from tests.support.mounts.mounting import Mounted, Reference

pytestmark = pytest.mark.one_data_path

KIND_OF = {4: stat.S_ISDIR, 8: stat.S_ISREG, 10: stat.S_ISLNK, 1: stat.S_ISFIFO}


def test_mkdir(kv: Path) -> None:
    """[mkdir] Mode less umask, the parent follows, EEXIST for any name, ENOENT without a parent."""
    kv.chmod(0o777)
    before = os.stat(kv)
    with Caller(1000, 2000, umask=0o027) as caller:
        caller.os("mkdir", str(kv / "d"), 0o1777)
    info = os.stat(kv / "d")
    assert stat.S_IMODE(info.st_mode) == 0o1750
    assert (info.st_uid, info.st_gid, info.st_nlink) == (1000, 2000, 2)
    after = os.stat(kv)
    assert after.st_nlink == before.st_nlink + 1
    assert after.st_mtime_ns > before.st_mtime_ns
    assert after.st_ctime_ns > before.st_ctime_ns
    write_file(kv / "file", b"")
    os.symlink("nowhere", kv / "link")
    for name in ("d", "file", "link", "."):
        with refused(EEXIST):
            os.mkdir(kv / name)
    with refused(ENOENT):
        os.mkdir(kv / "absent" / "d")
    with refused(ENOTDIR):
        os.mkdir(kv / "file" / "d")


def test_rmdir(kv: Path, mounted: Mounted | Reference) -> None:
    """[rmdir] Empty directories go; everything else is refused for its own reason."""
    (kv / "d" / "sub").mkdir(parents=True)
    write_file(kv / "file", b"")
    os.symlink("d", kv / "link")
    with refused(ENOTEMPTY):
        os.rmdir(kv / "d")
    for name in ("file", "link"):
        with refused(ENOTDIR):
            os.rmdir(kv / name)
    with refused(ENOENT):
        os.rmdir(kv / "absent")
    with refused(EINVAL):
        os.rmdir(f"{kv}/d/.")
    with refused(ENOTEMPTY):
        os.rmdir(f"{kv}/d/sub/..")
    with refused(EBUSY):
        os.rmdir(mounted.path)
    before = os.stat(kv)
    os.rmdir(kv / "d" / "sub")
    os.rmdir(kv / "d")
    after = os.stat(kv)
    assert after.st_nlink == before.st_nlink - 1
    assert after.st_mtime_ns > before.st_mtime_ns
    assert not os.path.lexists(kv / "d")


def test_a_removed_working_directory_is_empty(kv: Path) -> None:
    """[rmdir] Whoever stands in it sees nothing and makes nothing."""
    (kv / "d").mkdir()
    with opened(kv / "d", os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.rmdir(kv / "d")
        with refused(ENOENT):
            getdents(fd)
        assert os.fstat(fd).st_nlink == 0
        for call in (
            lambda: os.open("file", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=fd),
            lambda: os.mkdir("sub", dir_fd=fd),
            lambda: os.symlink("x", "link", dir_fd=fd),
            lambda: os.stat("file", dir_fd=fd),
        ):
            with refused(ENOENT):
                call()
    (kv / "d").mkdir()
    write_file(kv / "d" / "new", b"")


def test_a_listing_agrees_with_stat(kv: Path) -> None:
    """[readdir] Dots included: every name once, numbers and kinds as stat shows them."""
    (kv / "d").mkdir()
    write_file(kv / "file", b"")
    os.symlink("x", kv / "link")
    os.mkfifo(kv / "fifo")
    rows = {row.name: row for row in list_directory(kv)}
    assert sorted(rows) == [b".", b"..", b"d", b"fifo", b"file", b"link"]
    assert rows[b"."].ino == os.stat(kv).st_ino
    assert rows[b".."].ino == os.stat(kv.parent).st_ino
    for name in ("d", "fifo", "file", "link"):
        row = rows[name.encode()]
        info = os.lstat(kv / name)
        assert row.ino == info.st_ino
        assert KIND_OF[row.kind](info.st_mode)
    below = {row.name: row.ino for row in list_directory(kv / "d")}
    assert below == {b".": os.stat(kv / "d").st_ino, b"..": os.stat(kv).st_ino}


def test_dots_of_the_root(mounted: Mounted | Reference) -> None:
    """[readdir] The root lists both, and both are itself as far as one can walk."""
    rows = {row.name: row.ino for row in list_directory(mounted.path)}
    assert rows[b"."] == os.stat(mounted.path).st_ino
    assert b".." in rows


@pytest.mark.parametrize("room_bytes", [300, 4096, 1 << 20])
def test_long_listings_in_parts_of_any_size(kv: Path, room_bytes: int) -> None:
    """[readdir] 2,000 names with long names, whatever the buffer."""
    names = {f"{number}-{'n' * (number % 240)}".encode() for number in range(2000)}
    for name in names:
        write_file(os.fsencode(kv) + b"/" + name, b"")
    listed = [row.name for row in list_directory(kv, room_bytes)]
    assert len(listed) == len(names) + 2
    assert set(listed) == names | {b".", b".."}


def test_positions_stay_good(kv: Path) -> None:
    """[readdir-seek] Each telldir position leads to the same rest of the listing, twice."""
    for number in range(300):
        write_file(kv / f"name{number}", b"")
    with opened(kv, os.O_RDONLY | os.O_DIRECTORY) as fd:
        rows = []
        while batch := getdents(fd, 500):
            rows += batch
        names = [row.name for row in rows]
        assert len(set(names)) == len(rows) == 302
        for at in (0, 1, 2, 50, 299, 150, 301, 50):
            os.lseek(fd, rows[at].cookie, os.SEEK_SET)
            rest = []
            while batch := getdents(fd, 700):
                rest += batch
            assert [row.name for row in rest] == names[at + 1 :]


def test_positions_survive_their_names(kv: Path) -> None:
    """[readdir-seek] Behind a removed name the listing goes on with what followed it."""
    for number in range(200):
        write_file(kv / f"name{number}", b"")
    with opened(kv, os.O_RDONLY | os.O_DIRECTORY) as fd:
        rows = []
        while batch := getdents(fd, 500):
            rows += batch
        for row in rows[80:121]:
            os.unlink(os.fsencode(kv) + b"/" + row.name)
        os.lseek(fd, rows[100].cookie, os.SEEK_SET)
        rest = []
        while batch := getdents(fd, 500):
            rest += batch
        assert [row.name for row in rest] == [row.name for row in rows[121:]]
        os.lseek(fd, 0, os.SEEK_SET)
        write_file(kv / "new", b"")
        again = []
        while batch := getdents(fd, 500):
            again += batch
        expected = {row.name for row in rows[:80] + rows[121:]} | {b"new"}
        assert {row.name for row in again} == expected


def test_removing_while_listing_removes_all(kv: Path) -> None:
    """[readdir-stable] As rm -r does it: unlink what was listed, go on, until nothing is left."""
    for number in range(1500):
        write_file(kv / f"name{number}", b"")
    with opened(kv, os.O_RDONLY | os.O_DIRECTORY) as fd:
        seen: list[bytes] = []
        while batch := getdents(fd, 2048):
            for row in batch:
                if row.name not in (b".", b".."):
                    os.unlink(os.fsencode(kv) + b"/" + row.name)
                    seen.append(row.name)
    assert len(seen) == len(set(seen)) == 1500
    assert os.listdir(kv) == []


def test_a_listing_while_names_come_and_go(kv: Path) -> None:
    """[readdir-stable] What stays is listed exactly once in every listing, nothing twice."""
    staying = {b"stay%d" % number for number in range(500)}
    for name in staying:
        write_file(os.fsencode(kv) + b"/" + name, b"")
    for number in range(50):
        write_file(kv / f"before{number}", b"")
        os.unlink(kv / f"before{number}")
    code = (
        "import os, sys\n"
        "os.chdir(sys.argv[1])\n"
        "print('go', flush=True)\n"
        "n = 0\n"
        "while True:\n"
        "    n += 1\n"
        "    open(f'a{n}', 'w').close()\n"
        "    os.rename(f'a{n}', f'b{n}')\n"
        "    os.mkdir(f'd{n}')\n"
        "    if n > 20:\n"
        "        os.unlink(f'b{n - 20}')\n"
        "        os.rmdir(f'd{n - 20}')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(kv)], stdout=subprocess.PIPE
    ) as churning:
        try:
            assert churning.stdout is not None
            assert churning.stdout.readline() == b"go\n"
            for room_bytes in [600, 4096, 32768] * 8:
                listed = [row.name for row in list_directory(kv, room_bytes)]
                assert len(listed) == len(set(listed))
                assert staying <= set(listed)
                assert not [name for name in listed if name.startswith(b"before")]
        finally:
            churning.kill()


def test_many_names_are_found(kv: Path) -> None:
    """[readdir-large] 5,000 names in one directory; the million is a proof of its own."""
    for number in range(5_000):
        os.close(os.open(kv / f"{number:x}", os.O_CREAT | os.O_WRONLY, 0o600))
    listed = os.listdir(kv)
    assert len(listed) == len(set(listed)) == 5_000
    write_file(kv / "4d2", b"found")
    assert read_file(kv / f"{1234:x}") == b"found"
    assert not os.path.lexists(kv / "1389")
