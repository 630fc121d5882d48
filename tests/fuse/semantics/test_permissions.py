"""Permission checks, as callers without privilege meet them."""

import itertools
import os
import stat
from errno import EACCES, EPERM
from pathlib import Path

import pytest

from kvfs.core.inode_rules import blank_record
from kvfs.core.types import ROOT_INODE
from mount.files.callers import Credentials, may_empty, surely_may_open
from tests.support.clients.callers import Caller
from tests.support.kernel.calls import read_file, refused, write_file

pytestmark = pytest.mark.one_data_path

GROUP = 7777
READ, WRITE, EXECUTE = 4, 2, 1


def owned(path: Path, uid: int, gid: int, mode: int) -> str:
    """Give *path* owner and mode; return it as a string for a Caller."""
    os.chown(path, uid, gid)
    os.chmod(path, mode)
    return str(path)


@pytest.mark.parametrize("bits", range(8))
@pytest.mark.parametrize("who", ["owner", "group", "other"])
def test_each_bit_for_each_class(kv: Path, who: str, bits: int) -> None:
    """[permissions] Every mode of every class against open, access and write."""
    shift = {"owner": 6, "group": 3, "other": 0}[who]
    write_file(kv / "file", b"content")
    path = owned(kv / "file", 1000, GROUP, bits << shift)
    uid = 1000 if who == "owner" else 2000
    groups = [GROUP] if who == "group" else []
    with Caller(uid, 3000, groups=groups) as caller:
        for flags, needs in (
            (os.O_RDONLY, READ),
            (os.O_WRONLY, WRITE),
            (os.O_RDWR, READ | WRITE),
            (os.O_WRONLY | os.O_APPEND, WRITE),
        ):
            if bits & needs == needs:
                caller.try_open(path, flags)
            else:
                with refused(EACCES):
                    caller.os("open", path, flags)
        for wanted in range(8):
            assert caller.os("access", path, wanted) == (bits & wanted == wanted)


@pytest.mark.parametrize("bits", range(8))
def test_directories_ask_for_their_own_bits(kv: Path, nobody: Caller, bits: int) -> None:
    """[permissions] r lists, x passes, w with x changes names."""
    (kv / "d").mkdir()
    for name in ("file", "gone"):
        write_file(kv / "d" / name, b"content")
        os.chown(kv / "d" / name, nobody.uid, nobody.gid)
    path = owned(kv / "d", nobody.uid, nobody.gid, bits << 6)

    def allowed(needs: int, call: str, *args: object) -> None:
        if bits & needs == needs:
            nobody.os(call, *args)
        else:
            with refused(EACCES):
                nobody.os(call, *args)

    allowed(READ, "listdir", path)
    allowed(EXECUTE, "stat", f"{path}/file")
    allowed(EXECUTE, "truncate", f"{path}/file", 3)
    allowed(WRITE | EXECUTE, "mkdir", f"{path}/sub")
    allowed(WRITE | EXECUTE, "symlink", "x", f"{path}/link")
    allowed(WRITE | EXECUTE, "mkfifo", f"{path}/fifo")
    allowed(WRITE | EXECUTE, "rename", f"{path}/file", f"{path}/moved")
    allowed(WRITE | EXECUTE, "unlink", f"{path}/gone")


@pytest.mark.parametrize("bits", range(8))
@pytest.mark.parametrize("who", ["owner", "group", "other"])
def test_what_a_create_may_open_without_the_kernels_check(who: str, bits: int) -> None:
    """Never more than the class's bits grant, whatever groups the caller has besides."""
    shift = {"owner": 6, "group": 3, "other": 0}[who]
    mode = stat.S_IFREG | bits << shift
    record = blank_record(ROOT_INODE, b"file", mode, 1000, GROUP, 0)
    uid, gid = {"owner": (1000, 1), "group": (2000, GROUP), "other": (2000, 1)}[who]
    for flags, needs in (
        (os.O_RDONLY, READ),
        (os.O_WRONLY, WRITE),
        (os.O_RDWR, READ | WRITE),
        (os.O_RDONLY | os.O_TRUNC, READ | WRITE),
        (os.O_WRONLY | os.O_TRUNC, WRITE),
    ):
        granted = bits & needs == needs
        certain = granted and who != "other"
        assert surely_may_open(record, flags, uid, gid, sticky=False) == certain
        assert surely_may_open(record, flags, uid, gid, sticky=True) == (granted and uid == 1000)
        for_both = record._replace(mode=mode | bits << 3)
        if who == "other":
            assert surely_may_open(for_both, flags, uid, gid, sticky=False) == granted
        folder = record._replace(mode=stat.S_IFDIR | 0o777)
        assert not surely_may_open(folder, flags, uid, gid, sticky=False)


def test_each_component_of_a_path_is_checked(kv: Path, nobody: Caller) -> None:
    """[permissions] One closed directory on the way is enough; also after it was open."""
    (kv / "a" / "b" / "c").mkdir(parents=True)
    write_file(kv / "a" / "b" / "c" / "file", b"content")
    path = str(kv / "a" / "b" / "c" / "file")
    assert nobody.os("stat", path).st_size == 7
    for closed in ("a", "a/b", "a/b/c"):
        os.chmod(kv / closed, 0o700)
        with refused(EACCES):
            nobody.os("stat", path)
        os.chmod(kv / closed, 0o755)
        assert nobody.os("stat", path).st_size == 7


def test_an_open_descriptor_outlives_a_chmod(kv: Path, nobody: Caller) -> None:
    """[permissions] Rights are checked at open, not at each read."""
    write_file(kv / "file", b"content")
    fd = nobody.os("open", str(kv / "file"), os.O_RDONLY)
    os.chmod(kv / "file", 0)
    assert nobody.os("read", fd, 100) == b"content"
    nobody.os("close", fd)
    with refused(EACCES):
        nobody.os("open", str(kv / "file"), os.O_RDONLY)
    assert read_file(kv / "file") == b"content"


def test_access_answers_for_the_real_uid(kv: Path, nobody: Caller) -> None:
    """[access] Root may all but execute what has no x bit."""
    write_file(kv / "file", b"")
    os.chmod(kv / "file", 0)
    assert os.access(kv / "file", os.R_OK | os.W_OK)
    assert not os.access(kv / "file", os.X_OK)
    assert nobody.os("access", str(kv / "file"), os.F_OK)
    assert not nobody.os("access", str(kv / "file"), os.R_OK)
    os.chmod(kv / "file", 0o001)
    assert os.access(kv / "file", os.X_OK)
    assert nobody.os("access", str(kv / "file"), os.X_OK)
    assert not os.access(kv / "absent", os.F_OK)


def test_a_setgid_directory_hands_its_group_down(kv: Path) -> None:
    """[setgid-directory] To files, FIFOs, symlinks and directories, which are setgid again."""
    (kv / "d").mkdir()
    path = owned(kv / "d", 0, GROUP, 0o2777)
    with Caller(1000, 1000) as caller:
        caller.try_open(f"{path}/file", os.O_CREAT | os.O_WRONLY, 0o666)
        caller.os("mkdir", f"{path}/sub", 0o777)
        caller.os("mkdir", f"{path}/sub/sub", 0o700)
        caller.os("symlink", "x", f"{path}/link")
        caller.os("mkfifo", f"{path}/fifo", 0o600)
    for name in ("file", "sub", "sub/sub", "link", "fifo"):
        info = os.lstat(kv / "d" / name)
        assert (info.st_uid, info.st_gid) == (1000, GROUP), name
    assert stat.S_IMODE(os.stat(kv / "d" / "sub").st_mode) == 0o2755
    assert stat.S_IMODE(os.stat(kv / "d" / "sub" / "sub").st_mode) == 0o2700
    assert stat.S_IMODE(os.stat(kv / "d" / "file").st_mode) == 0o644


def test_a_sticky_directory_guards_its_names(kv: Path, nobody: Caller, other: Caller) -> None:
    """[sticky-directory] Owner of the name, owner of the directory, root; nobody else."""
    (kv / "d").mkdir()
    path = owned(kv / "d", 0, 0, 0o1777)
    for name in ("first", "second", "third"):
        nobody.try_open(f"{path}/{name}", os.O_CREAT | os.O_WRONLY, 0o666)
    other.try_open(f"{path}/others", os.O_CREAT | os.O_WRONLY, 0o666)
    with refused(EPERM, EACCES):
        other.os("unlink", f"{path}/first")
    with refused(EPERM, EACCES):
        other.os("rename", f"{path}/first", f"{path}/stolen")
    with refused(EPERM, EACCES):
        other.os("rename", f"{path}/others", f"{path}/first")
    nobody.os("unlink", f"{path}/first")
    nobody.os("rename", f"{path}/second", f"{path}/moved")
    os.unlink(f"{path}/moved")
    os.chown(path, other.uid, other.gid)
    other.os("unlink", f"{path}/third")
    assert os.listdir(path) == ["others"]


def test_renames_need_both_directories(kv: Path, nobody: Caller) -> None:
    """[permissions] Write on the one it leaves and on the one it enters."""
    for name, mode in (("open", 0o777), ("closed", 0o755)):
        (kv / name).mkdir()
        os.chmod(kv / name, mode)
        write_file(kv / name / "file", b"")
    for old, new in itertools.permutations(("open", "closed")):
        with refused(EACCES):
            nobody.os("rename", str(kv / old / "file"), str(kv / new / "target"))
    nobody.os("rename", str(kv / "open" / "file"), str(kv / "open" / "target"))


def test_a_foreign_directory_cannot_be_moved_into_another(kv: Path, nobody: Caller) -> None:
    """[permissions] Moving a directory rewrites its "..": that needs write on the directory."""
    for name in ("from", "to"):
        (kv / name).mkdir()
        os.chmod(kv / name, 0o777)
    (kv / "from" / "d").mkdir()
    with refused(EACCES):
        nobody.os("rename", str(kv / "from" / "d"), str(kv / "to" / "d"))
    os.chmod(kv / "from" / "d", 0o777)
    nobody.os("rename", str(kv / "from" / "d"), str(kv / "to" / "d"))


def test_attributes_follow_the_file_permissions(kv: Path, nobody: Caller) -> None:
    """[permissions] user.* attributes: read to get, write to set."""
    write_file(kv / "file", b"")
    os.setxattr(kv / "file", "user.a", b"1")
    path = str(kv / "file")
    assert nobody.os("getxattr", path, "user.a") == b"1"
    with refused(EACCES):
        nobody.os("setxattr", path, "user.a", b"2")
    with refused(EACCES):
        nobody.os("removexattr", path, "user.a")
    os.chmod(path, 0o602)
    nobody.os("setxattr", path, "user.a", b"2")
    os.chmod(path, 0o600)
    with refused(EACCES):
        nobody.os("getxattr", path, "user.a")


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("bits", range(8))
@pytest.mark.parametrize("who", ["owner", "group", "supplementary", "others"])
def test_who_may_empty_a_file_behind_a_lookup(who: str, bits: int, reads: bool) -> None:
    shift = {"owner": 6, "others": 0}.get(who, 3)
    record = blank_record(ROOT_INODE, b"K", stat.S_IFREG | bits << shift, 0, 0, 0)._replace(
        uid=1000, gid=GROUP
    )
    caller = Credentials(
        1000 if who == "owner" else 2000,
        GROUP if who == "group" else 3000,
        frozenset({8888, GROUP} if who == "supplementary" else {8888}),
        overrides=False,
    )
    needs = 6 if reads else 2
    assert may_empty(record, caller, reads=reads, sticky=False) == (bits & needs == needs)
    assert may_empty(record, caller._replace(overrides=True), reads=reads, sticky=False)


def test_in_a_sticky_directory_only_the_owner_empties() -> None:
    """An O_CREAT of others is refused there, to root too (fs.protected_regular)."""
    record = blank_record(ROOT_INODE, b"K", stat.S_IFREG | 0o666, 0, 0, 0)._replace(uid=1000)
    for uid in (0, 1000, 2000):
        caller = Credentials(uid, 0, frozenset(), overrides=uid == 0)
        assert may_empty(record, caller, reads=True, sticky=True) == (uid == 1000)
