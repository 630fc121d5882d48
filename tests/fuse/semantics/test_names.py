"""Names and paths."""

import os
import stat
from errno import ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR
from pathlib import Path

import pytest

from tests.support.kernel.calls import (
    RENAME_NOREPLACE,
    list_directory,
    opened,
    read_file,
    refused,
    renameat2,
    write_file,
)
from tests.support.mounts.mounting import Mounted

pytestmark = pytest.mark.one_data_path

LONGEST = 255
ODD_NAMES = [
    b"a",
    b" ",
    b"...",
    b"-rf",
    b"\\",
    b"new\nline",
    b"\xff\xfe not utf-8 \x80",
    "ä".encode(),
    "a\u0308".encode(),
    b"\x01\x7f",
    b"x" * LONGEST,
    bytes(range(1, 47)) + bytes(range(48, 256)),
]


def test_any_bytes_make_a_name(kv: Path) -> None:
    """[names] Every byte but NUL and slash, kept as given, case and all."""
    root = os.fsencode(kv)
    for number, name in enumerate(ODD_NAMES):
        write_file(root + b"/" + name, b"%d" % number)
    assert sorted(os.listdir(root)) == sorted(ODD_NAMES)
    for number, name in enumerate(ODD_NAMES):
        assert read_file(root + b"/" + name) == b"%d" % number
    write_file(kv / "A", b"upper")
    assert read_file(kv / "a") == b"0"
    for name in ODD_NAMES:
        os.unlink(root + b"/" + name)
    assert os.listdir(kv) == ["A"]


@pytest.mark.parametrize("byte", [b"n", b"\xff", b"\n"])
def test_a_name_of_255_bytes_goes_through_every_call(kv: Path, byte: bytes) -> None:
    """[names] The longest name is a name like any other."""
    root = os.fsencode(kv) + b"/"
    name = byte * LONGEST
    os.mkdir(root + name)
    write_file(root + name + b"/" + name, b"inside")
    os.rename(root + name + b"/" + name, root + byte * (LONGEST - 1) + b"z")
    os.rmdir(root + name)
    os.symlink(b"target", root + name)
    assert os.readlink(root + name) == b"target"
    assert stat.S_ISLNK(os.lstat(root + name).st_mode)


@pytest.mark.parametrize("length", [256, 300, 1000])
def test_longer_names_are_refused_by_every_call(kv: Path, length: int) -> None:
    """[names-long] ENAMETOOLONG, whether a call would create or only looks."""
    long = kv / ("n" * length)
    short = kv / "short"
    write_file(short, b"")
    directory = kv / "directory"
    directory.mkdir()
    calls = [
        lambda: os.open(long, os.O_RDONLY),
        lambda: os.open(long, os.O_CREAT | os.O_WRONLY, 0o600),
        lambda: os.mkdir(long),
        lambda: os.rmdir(long),
        lambda: os.unlink(long),
        lambda: os.symlink("target", long),
        lambda: os.mknod(long, 0o600 | stat.S_IFIFO),
        lambda: os.rename(short, long),
        lambda: os.rename(long, short),
        lambda: os.rename(directory, long),
        lambda: renameat2(short, long, RENAME_NOREPLACE),
        lambda: os.stat(long),
        lambda: os.lstat(long),
        lambda: os.access(long, os.F_OK) or os.stat(long),
        lambda: os.readlink(long),
        lambda: os.chmod(long, 0o600),
        lambda: os.truncate(long, 0),
        lambda: os.utime(long),
        lambda: os.listdir(long),
        lambda: os.stat(long / "below"),
    ]
    for call in calls:
        with refused(ENAMETOOLONG):
            call()
    assert sorted(os.listdir(kv)) == ["directory", "short"]


def test_directories_nest_deeper_than_a_path_is_long(kv: Path) -> None:
    """[names-depth] 200 levels of 100 bytes: openat reaches what no path can name."""
    name, depth = "d" * 100, 200
    fds = [os.open(kv, os.O_PATH)]
    try:
        for _ in range(depth):
            os.mkdir(name, dir_fd=fds[-1])
            fds.append(os.open(name, os.O_PATH | os.O_DIRECTORY, dir_fd=fds[-1]))
        with opened("bottom", os.O_CREAT | os.O_RDWR, dir_fd=fds[-1]) as fd:
            os.write(fd, b"deep")
        assert os.stat("bottom", dir_fd=fds[-1]).st_size == 4
        with refused(ENAMETOOLONG):
            os.stat(str(kv) + f"/{name}" * 41)
        os.unlink("bottom", dir_fd=fds[-1])
        for parent in reversed(fds[:-1]):
            os.rmdir(name, dir_fd=parent)
    finally:
        for fd in fds:
            os.close(fd)
    assert os.listdir(kv) == []


def test_looking_up_what_is_not_there(kv: Path) -> None:
    """[lookup] ENOENT for absent names, ENOTDIR below files, dots by the kernel."""
    (kv / "directory").mkdir()
    write_file(kv / "file", b"content")
    with refused(ENOENT):
        os.stat(kv / "absent")
    with refused(ENOENT):
        os.stat(kv / "absent" / "below")
    with refused(ENOTDIR):
        os.stat(kv / "file" / "below")
    with refused(ENOTDIR):
        os.stat(f"{kv}/file/")
    with refused(ENOENT):
        os.stat("")
    assert read_file(f"{kv}/directory/../file") == b"content"
    assert read_file(f"{kv}/./file") == b"content"
    assert not os.access(kv / "absent", os.F_OK)


def test_an_absent_name_appears_when_it_is_created(kv: Path) -> None:
    """[lookup] A remembered "no" never hides a name that was made by any way of making names."""
    os.mkdir(kv / "elsewhere")
    makers = {
        "created": lambda path: write_file(path, b""),
        "directory": os.mkdir,
        "symlink": lambda path: os.symlink("elsewhere", path),
        "fifo": os.mkfifo,
        "renamed": lambda path: (write_file(kv / "tmp", b""), os.rename(kv / "tmp", path)),
    }
    for name, make in makers.items():
        for _ in range(2):
            assert not os.path.lexists(kv / name)
        make(kv / name)
        assert os.path.lexists(kv / name)
        os.rename(kv / name, kv / "elsewhere" / name)
        assert not os.path.lexists(kv / name)


def test_a_symlink_loop_ends(kv: Path) -> None:
    """[symlinks] A symlink that leads to itself is ELOOP."""
    os.symlink("loop", kv / "loop")
    with refused(ELOOP):
        os.stat(kv / "loop")


def test_inode_numbers_are_unique_and_stay(kv: Path) -> None:
    """[inode-numbers] One number a file for life, renames included; listings agree."""
    (kv / "d").mkdir()
    for number in range(50):
        write_file(kv / f"f{number}", b"")
    seen = {name: os.lstat(kv / name).st_ino for name in os.listdir(kv)}
    assert len(set(seen.values())) == len(seen)
    listed = {os.fsdecode(row.name): row.ino for row in list_directory(kv)}
    assert {name: listed[name] for name in seen} == seen
    os.rename(kv / "f0", kv / "d" / "renamed")
    assert os.stat(kv / "d" / "renamed").st_ino == seen["f0"]


def test_inode_numbers_are_never_given_again(kv: Path, mount: Mounted) -> None:
    """[inode-numbers] A number of a removed file is gone for good, also after a remount."""
    used = set()
    for _ in range(3):
        for number in range(40):
            path = kv / f"f{number}"
            write_file(path, b"")
            ino = os.stat(path).st_ino
            assert ino not in used
            used.add(ino)
            os.unlink(path)
        mount.remount()
