"""The cases of pjdfstest, as tables: every call against every way that its path can be wrong.

A row says who calls what and which errno it must get; the same rows run on XFS with
KVFS_TEST_REFERENCE, which is what "behaves as on XFS" means.
"""

import itertools
import os
import stat
from collections.abc import Callable
from errno import (
    EACCES,
    EEXIST,
    EINVAL,
    EISDIR,
    ELOOP,
    ENAMETOOLONG,
    ENOENT,
    ENOTDIR,
    ENXIO,
    EPERM,
)
from pathlib import Path
from typing import Final

import pytest

from tests.support.clients.callers import Caller
from tests.support.kernel.calls import opened, read_file, refused, write_file

pytestmark = pytest.mark.one_data_path

NOBODY, OTHER, GROUP = 65534, 65533, 65532
NAME_MAX: Final = 255
PATH_MAX: Final = 4096

#: Calls that look a path up; each takes the caller and the path.
LOOKING: Final[dict[str, Callable[[Caller, str], object]]] = {
    "open": lambda who, path: who.try_open(path, os.O_RDONLY),
    "chmod": lambda who, path: who.os("chmod", path, 0o600),
    "chown": lambda who, path: who.os("chown", path, -1, -1),
    "truncate": lambda who, path: who.os("truncate", path, 0),
    "utime": lambda who, path: who.os("utime", path),
    "stat": lambda who, path: who.os("stat", path),
    "unlink": lambda who, path: who.os("unlink", path),
    "rmdir": lambda who, path: who.os("rmdir", path),
    "rename": lambda who, path: who.os("rename", path, f"{path}-renamed"),
}
#: Calls that make a name.
MAKING: Final[dict[str, Callable[[Caller, str], object]]] = {
    "create": lambda who, path: who.try_open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY),
    "mkdir": lambda who, path: who.os("mkdir", path),
    "mkfifo": lambda who, path: who.os("mkfifo", path),
    "symlink": lambda who, path: who.os("symlink", "target", path),
}
#: With link(2), of what is elsewhere: linkat(2) looks at the new name before that (EXDEV).
NAMING: Final[dict[str, Callable[[Caller, str], object]]] = {
    **MAKING,
    "link": lambda who, path: who.os("link", "/dev/null", path),
}
CALLS: Final = {**LOOKING, **NAMING}
#: Calls that do not follow a symlink at the end of their path.
ON_THE_NAME: Final = {"unlink", "rmdir", "rename", *NAMING}


def made(path: Path, kind: str) -> Path:
    """Make one file of a kind."""
    match kind:
        case "file":
            write_file(path, b"content")
        case "dir":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "symlink":
            os.symlink("nowhere", path)
    return path


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["file", "fifo"])
def test_a_path_through_no_directory(kv: Path, nobody: Caller, call: str, kind: str) -> None:
    """[lookup] ENOTDIR."""
    made(kv / "middle", kind)
    with refused(ENOTDIR):
        CALLS[call](nobody, str(kv / "middle" / "name"))


@pytest.mark.parametrize("call", CALLS)
def test_a_path_through_nothing(kv: Path, nobody: Caller, call: str) -> None:
    """[lookup] ENOENT for a missing component, and for a missing end unless it is made."""
    with refused(ENOENT):
        CALLS[call](nobody, str(kv / "missing" / "name"))
    os.symlink("missing", kv / "dangling")
    with refused(ENOENT):
        CALLS[call](nobody, str(kv / "dangling" / "name"))
    if call in LOOKING:
        with refused(ENOENT):
            LOOKING[call](nobody, str(kv / "missing"))


@pytest.mark.parametrize("call", CALLS)
def test_names_and_paths_that_are_too_long(kv: Path, nobody: Caller, call: str) -> None:
    """[names-long] One byte over 255, in the middle and at the end; a path over 4095."""
    long = "n" * (NAME_MAX + 1)
    for path in (f"{kv}/{long}", f"{kv}/{long}/name", f"{kv}/" + "d/" * PATH_MAX):
        with refused(ENAMETOOLONG):
            CALLS[call](nobody, path)


@pytest.mark.parametrize("call", CALLS)
def test_loops_of_symlinks(kv: Path, nobody: Caller, call: str) -> None:
    """[symlinks] ELOOP in the middle always, at the end for calls that follow."""
    os.symlink("two", kv / "one")
    os.symlink("one", kv / "two")
    with refused(ELOOP):
        CALLS[call](nobody, str(kv / "one" / "name"))
    if call not in ON_THE_NAME:
        with refused(ELOOP):
            CALLS[call](nobody, str(kv / "one"))


@pytest.mark.parametrize("call", CALLS)
def test_no_way_through_a_closed_directory(kv: Path, nobody: Caller, call: str) -> None:
    """[permissions] EACCES without x, for files that are there and for those that are not."""
    (kv / "closed").mkdir()
    write_file(kv / "closed" / "file", b"content")
    os.chown(kv / "closed" / "file", NOBODY, NOBODY)
    os.chmod(kv / "closed", 0o666)
    for name in ("file", "missing"):
        with refused(EACCES):
            CALLS[call](nobody, str(kv / "closed" / name))


@pytest.mark.parametrize("call", [*MAKING, "unlink", "rename"])
def test_names_change_only_in_writable_directories(kv: Path, nobody: Caller, call: str) -> None:
    """[permissions] EACCES without w, whoever owns the file."""
    (kv / "d").mkdir()
    name = "new" if call in MAKING else "file"
    write_file(kv / "d" / "file", b"content")
    os.chown(kv / "d" / "file", NOBODY, NOBODY)
    with refused(EACCES):
        CALLS[call](nobody, str(kv / "d" / name))
    os.chmod(kv / "d", 0o777)
    CALLS[call](nobody, str(kv / "d" / name))


@pytest.mark.parametrize("call", NAMING)
@pytest.mark.parametrize("kind", ["file", "dir", "fifo", "symlink"])
def test_a_name_that_is_taken(kv: Path, nobody: Caller, call: str, kind: str) -> None:
    """[create-exclusive] EEXIST, even where the caller could not have made a name."""
    made(kv / "taken", kind)
    before = os.lstat(kv / "taken")
    with refused(EEXIST):
        NAMING[call](nobody, str(kv / "taken"))
    assert os.lstat(kv / "taken") == before


@pytest.mark.parametrize("kind", ["file", "dir", "fifo"])
def test_only_the_owner_changes_attributes(
    kv: Path, nobody: Caller, other: Caller, kind: str
) -> None:
    """[chmod] EPERM for others, and a refused change leaves ctime alone."""
    path = str(made(kv / "it", kind))
    os.chown(path, NOBODY, NOBODY)
    before = os.stat(path)
    for call, arguments in (
        ("chmod", (0o777,)),
        ("chown", (OTHER, -1)),
        ("chown", (-1, OTHER)),
        ("utime", ((1, 1),)),
    ):
        with refused(EPERM):
            other.os(call, path, *arguments)
    assert os.stat(path) == before
    nobody.os("chmod", path, 0o641)
    nobody.os("utime", path, (1, 1))
    after = os.stat(path)
    assert stat.S_IMODE(after.st_mode) == 0o641
    assert after.st_ctime_ns > before.st_ctime_ns


def test_setgid_goes_when_the_group_is_foreign(kv: Path) -> None:
    """[chmod] A directory's owner outside its group cannot make it setgid: the bit is dropped."""
    (kv / "d").mkdir()
    os.chown(kv / "d", NOBODY, GROUP)
    with Caller(NOBODY, NOBODY) as outsider:
        outsider.os("chmod", str(kv / "d"), 0o2755)
    assert stat.S_IMODE(os.stat(kv / "d").st_mode) == 0o755
    with Caller(NOBODY, NOBODY, groups=[GROUP]) as member:
        member.os("chmod", str(kv / "d"), 0o2755)
    assert stat.S_IMODE(os.stat(kv / "d").st_mode) == 0o2755


def test_group_changes_by_the_owner(kv: Path, other: Caller) -> None:
    """[chown] To its own groups and nowhere else; -1,-1 by anybody's owner is nothing."""
    path = str(made(kv / "file", "file"))
    os.chown(path, NOBODY, NOBODY)
    with Caller(NOBODY, NOBODY, groups=[GROUP]) as member:
        member.os("chown", path, NOBODY, GROUP)
        assert os.stat(path).st_gid == GROUP
        member.os("chown", path, -1, NOBODY)
        assert os.stat(path).st_gid == NOBODY
        with refused(EPERM):
            member.os("chown", path, -1, OTHER)
        with refused(EPERM):
            member.os("chown", path, OTHER, -1)
    with refused(EPERM):
        other.os("chown", path, OTHER, OTHER)


@pytest.mark.parametrize(
    ("directory_owner", "file_owner"), list(itertools.product([0, NOBODY, OTHER], repeat=2))
)
@pytest.mark.parametrize("kind", ["file", "dir", "fifo", "symlink"])
@pytest.mark.parametrize("call", ["remove", "rename", "replace"])
def test_sticky_directories(
    kv: Path, nobody: Caller, call: str, kind: str, directory_owner: int, file_owner: int
) -> None:
    """[sticky-directory] The owner of the name or of the directory may; else EPERM."""
    (kv / "d").mkdir()
    made(kv / "d" / "it", kind)
    os.chown(kv / "d" / "it", file_owner, 0, follow_symlinks=False)
    made(kv / "d" / "mine", "dir" if kind == "dir" else "file")
    os.chown(kv / "d" / "mine", NOBODY, 0)
    os.chown(kv / "d", directory_owner, 0)
    os.chmod(kv / "d", 0o1777)
    it, mine = str(kv / "d" / "it"), str(kv / "d" / "mine")

    def attempt() -> None:
        if call == "remove":
            nobody.os("rmdir" if kind == "dir" else "unlink", it)
        elif call == "rename":
            nobody.os("rename", it, str(kv / "d" / "renamed"))
        else:
            nobody.os("rename", mine, it)

    may = NOBODY in (directory_owner, file_owner)
    # Moving a directory to another name in the same parent rewrites no "..": sticky alone counts.
    if may:
        attempt()
    else:
        with refused(EPERM):
            attempt()
        assert os.path.lexists(it)


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC])
def test_opening_a_directory_for_writing(kv: Path, flags: int) -> None:
    """[open-flags] EISDIR."""
    (kv / "d").mkdir()
    with refused(EISDIR):
        os.open(kv / "d", flags)


def test_opening_a_fifo_without_a_reader(kv: Path) -> None:
    """[fifos-sockets] ENXIO for a writer that does not want to wait, as for a socket."""
    os.mkfifo(kv / "fifo")
    os.mknod(kv / "socket", stat.S_IFSOCK | 0o600)
    for name in ("fifo", "socket"):
        with refused(ENXIO):
            os.open(kv / name, os.O_WRONLY | os.O_NONBLOCK)


def test_a_failed_create_changes_nothing(kv: Path, nobody: Caller) -> None:
    """[create] No name, and the directory's times stay."""
    before = os.stat(kv)
    for call in MAKING.values():
        with refused(EACCES):
            call(nobody, str(kv / "new"))
    after = os.stat(kv)
    assert os.listdir(kv) == []
    assert (after.st_mtime_ns, after.st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)


@pytest.mark.parametrize("mode", [0o000, 0o151, 0o644, 0o777, 0o345])
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o501])
def test_modes_less_umask(kv: Path, mode: int, umask: int) -> None:
    """[create] Files, directories and FIFOs of every mode under every umask."""
    with Caller(umask=umask) as caller:
        caller.try_open(str(kv / "file"), os.O_CREAT | os.O_WRONLY, mode)
        caller.os("mkdir", str(kv / "dir"), mode)
        caller.os("mkfifo", str(kv / "fifo"), mode)
    for name in ("file", "dir", "fifo"):
        assert stat.S_IMODE(os.stat(kv / name).st_mode) == mode & ~umask


def test_truncating_what_one_may_not_write(kv: Path, nobody: Caller) -> None:
    """[truncate] EACCES by path; a descriptor that was opened for writing still may."""
    path = str(made(kv / "file", "file"))
    os.chown(path, NOBODY, NOBODY)
    fd = nobody.os("open", path, os.O_RDWR)
    os.chmod(path, 0o444)
    with refused(EACCES):
        nobody.os("truncate", path, 2)
    nobody.os("ftruncate", fd, 2)
    with refused(EINVAL):
        nobody.os("ftruncate", fd, -1)
    nobody.os("close", fd)
    assert read_file(path) == b"co"


@pytest.mark.parametrize("kind", ["file", "dir", "fifo", "symlink"])
def test_ctime_of_what_is_renamed(kv: Path, kind: str) -> None:
    """[rename] ctime advances, mtime does not."""
    made(kv / "old", kind)
    before = os.lstat(kv / "old")
    os.rename(kv / "old", kv / "new")
    after = os.lstat(kv / "new")
    assert after.st_ctime_ns > before.st_ctime_ns
    assert after.st_mtime_ns == before.st_mtime_ns
    assert after.st_ino == before.st_ino


def test_links_and_times(kv: Path, nobody: Caller) -> None:
    """[hard-links] The file's ctime and the new directory's times, at the link and at each unlink.

    What the caller may not write takes no name (EACCES).
    """
    (kv / "d").mkdir()
    file, second = made(kv / "file", "file"), kv / "d" / "second"

    def times() -> list[int]:
        info, directory = os.stat(file), os.stat(kv / "d")
        return [info.st_ctime_ns, directory.st_ctime_ns, directory.st_mtime_ns]

    before = times()
    mtime_ns = os.stat(file).st_mtime_ns
    os.link(file, second)
    between = times()
    os.unlink(second)
    after = times()
    assert all(one < two < three for one, two, three in zip(before, between, after, strict=True))
    assert os.stat(file).st_mtime_ns == mtime_ns
    (kv / "own").mkdir()
    os.chown(kv / "own", NOBODY, NOBODY)
    own = str(kv / "own" / "file")
    nobody.os("close", nobody.os("open", own, os.O_CREAT | os.O_WRONLY, 0o600))
    with refused(EACCES):
        nobody.os("link", own, str(second))
    nobody.os("link", own, f"{own}2")


def test_unlink_advances_the_ctime_of_an_open_file(kv: Path) -> None:
    """[unlink] Seen through the descriptor, with no links left."""
    made(kv / "file", "file")
    with opened(kv / "file", os.O_RDONLY) as fd:
        before = os.fstat(fd)
        os.unlink(kv / "file")
        after = os.fstat(fd)
    assert after.st_ctime_ns > before.st_ctime_ns
    assert (before.st_nlink, after.st_nlink) == (1, 0)
