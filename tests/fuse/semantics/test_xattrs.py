"""Extended attributes."""

import contextlib
import os
from errno import E2BIG, EEXIST, ENODATA, ENOSPC, EOPNOTSUPP, EPERM, ERANGE
from pathlib import Path

import pytest

from kvfs.pool.open.open_notes import NAMELESS_MAX_BYTES
from tests.support.kernel.calls import listxattr_into, opened, refused, write_file
from tests.support.mounts.mounting import Mounted, Reference

pytestmark = pytest.mark.one_data_path

#: Version 2 and the three rows that an ACL must have (linux/posix_acl_xattr.h).
MINIMAL_ACL = bytes.fromhex("0200000001000600ffffffff04000400ffffffff20000400ffffffff")
CREATE, REPLACE = os.XATTR_CREATE, os.XATTR_REPLACE


def test_attributes_of_files_and_directories(kv: Path, mounted: Mounted | Reference) -> None:
    """[xattrs] Set, got, listed, replaced, removed; by path and descriptor; kept by a remount."""
    write_file(kv / "file", b"")
    (kv / "d").mkdir()
    for path in (kv / "file", kv / "d"):
        assert os.listxattr(path) == []
        os.setxattr(path, "user.a", b"first")
        os.setxattr(path, "user.empty", b"")
        os.setxattr(path, b"user.\xff\xfe", bytes(range(256)))
        assert os.getxattr(path, "user.a") == b"first"
        os.setxattr(path, "user.a", b"second, longer")
        with opened(path, os.O_RDONLY) as fd:
            assert os.getxattr(fd, "user.a") == b"second, longer"
            os.setxattr(fd, "user.b", b"by descriptor")
    mounted.remount()
    for path in (kv / "file", kv / "d"):
        assert len(os.listxattr(path)) == 4
        assert os.getxattr(path, "user.a") == b"second, longer"
        assert os.getxattr(path, "user.empty") == b""
        assert os.getxattr(path, b"user.\xff\xfe") == bytes(range(256))
        os.removexattr(path, "user.a")
        with refused(ENODATA):
            os.getxattr(path, "user.a")
        with refused(ENODATA):
            os.removexattr(path, "user.a")
        assert len(os.listxattr(path)) == 3


def test_create_and_replace_flags(kv: Path) -> None:
    """[xattrs] XATTR_CREATE and XATTR_REPLACE refuse what they exclude."""
    write_file(kv / "file", b"")
    with refused(ENODATA):
        os.setxattr(kv / "file", "user.a", b"1", REPLACE)
    os.setxattr(kv / "file", "user.a", b"1", CREATE)
    with refused(EEXIST):
        os.setxattr(kv / "file", "user.a", b"2", CREATE)
    assert os.getxattr(kv / "file", "user.a") == b"1"
    os.setxattr(kv / "file", "user.a", b"3", REPLACE)
    assert os.getxattr(kv / "file", "user.a") == b"3"


def test_attributes_belong_to_the_file(kv: Path) -> None:
    """[xattrs] They follow a rename, and a new file of the name has none."""
    write_file(kv / "file", b"")
    os.setxattr(kv / "file", "user.a", b"1")
    os.rename(kv / "file", kv / "moved")
    write_file(kv / "file", b"")
    assert os.listxattr(kv / "file") == []
    assert os.getxattr(kv / "moved", "user.a") == b"1"
    os.rename(kv / "file", kv / "moved")
    assert os.listxattr(kv / "moved") == []


@pytest.mark.parametrize("replaced", [False, True], ids=["unlinked", "replaced"])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_attributes_of_what_has_no_name(kv: Path, kind: str, *, replaced: bool) -> None:
    """[xattrs] Who has it open reads, sets and removes them until the last close."""
    for name in ("one", "other"):
        write_file(kv / name, b"bytes") if kind == "file" else os.mkdir(kv / name)
    os.setxattr(kv / "one", "user.a", b"1")
    with opened(kv / "one", os.O_RDONLY) as fd:
        if replaced:
            os.rename(kv / "other", kv / "one")
        else:
            os.unlink(kv / "one") if kind == "file" else os.rmdir(kv / "one")
        assert os.getxattr(fd, "user.a") == b"1"
        before = os.fstat(fd).st_ctime_ns
        os.setxattr(fd, "user.b", b"2", CREATE)
        assert os.fstat(fd).st_ctime_ns > before
        os.setxattr(fd, "user.a", b"3", REPLACE)
        with refused(EEXIST):
            os.setxattr(fd, "user.b", b"4", CREATE)
        assert sorted(os.listxattr(fd)) == ["user.a", "user.b"]
        assert os.getxattr(fd, "user.a") == b"3"
        os.removexattr(fd, "user.a")
        assert os.listxattr(fd) == ["user.b"]
        with refused(ENODATA):
            os.getxattr(fd, "user.a")
    if replaced:
        assert os.listxattr(kv / "one") == []


def test_a_small_buffer_is_refused(kv: Path) -> None:
    """[xattrs] ERANGE for lists and values that do not fit; size 0 asks how much is needed."""
    write_file(kv / "file", b"")
    os.setxattr(kv / "file", "user.a", b"x" * 100)
    os.setxattr(kv / "file", "user.bb", b"y")
    needed = len(b"user.a\0user.bb\0")
    assert listxattr_into(kv / "file", 0) == needed
    assert listxattr_into(kv / "file", needed) == needed
    with refused(ERANGE):
        listxattr_into(kv / "file", needed - 1)


def test_symlinks_have_no_user_attributes(kv: Path) -> None:
    """[xattrs] The kernel's rule: EPERM."""
    os.symlink("x", kv / "link")
    with refused(EPERM):
        os.setxattr(kv / "link", "user.a", b"1", follow_symlinks=False)


@pytest.mark.usefixtures("kvfs_only")
def test_bounds_of_attributes(kv: Path) -> None:
    """[xattrs-bounds] A value to 4096 bytes, a file's to 16 KiB; refused ones leave the rest."""
    write_file(kv / "file", b"")
    os.setxattr(kv / "file", "user.a", b"x" * 4096)
    with refused(E2BIG):
        os.setxattr(kv / "file", "user.a", b"y" * 4097)
    assert os.getxattr(kv / "file", "user.a") == b"x" * 4096
    fitted = 1
    with refused(E2BIG):
        for number in range(20):
            os.setxattr(kv / "file", f"user.{number}", b"z" * 4000)
            fitted += 1
    assert 3 <= fitted <= 4
    assert len(os.listxattr(kv / "file")) == fitted
    os.removexattr(kv / "file", "user.a")
    os.setxattr(kv / "file", "user.again", b"fits")


def test_a_name_of_255_bytes(kv: Path) -> None:
    """[xattrs-bounds] The kernel's own bound: longer is ERANGE."""
    write_file(kv / "file", b"")
    name = "user." + "n" * 250
    os.setxattr(kv / "file", name, b"1")
    assert os.listxattr(kv / "file") == [name]
    with refused(ERANGE):
        os.setxattr(kv / "file", name + "n", b"1")


@pytest.mark.usefixtures("kvfs_only")
def test_attributes_without_a_name_are_bounded_together(kv: Path) -> None:
    """[xattrs-bounds] Those of open files that were removed are in the server's memory."""

    def removed(number: int) -> int:
        path = kv / f"{number}"
        fd = stack.enter_context(opened(path, os.O_RDWR | os.O_CREAT))
        for attribute in range(3):
            os.setxattr(fd, f"user.{attribute}", b"x" * 4096)
        os.unlink(path)
        return fd

    with contextlib.ExitStack() as stack:
        first = removed(0)
        assert len(os.listxattr(first)) == 3
        number = 0
        while os.listxattr(last := removed(number := number + 1)):
            assert number < NAMELESS_MAX_BYTES // (3 * 4096), "they have no bound"
        assert number > NAMELESS_MAX_BYTES // (3 * 4096) // 3
        with refused(ENOSPC):
            for attribute in range(3):
                os.setxattr(last, f"user.{attribute}", b"x" * 4096)
        os.setxattr(first, "user.1", b"as large as bef.".ljust(4096))
        os.removexattr(first, "user.2")
        os.setxattr(last, "user.more", b"as large as that one")
    with contextlib.ExitStack() as stack:
        assert len(os.listxattr(removed(0))) == 3


@pytest.mark.usefixtures("kvfs_only")
@pytest.mark.parametrize(
    "name",
    [
        "trusted.a",
        "trusted.kvfs.fixed",
        "security.capability",
        "security.selinux",
        "system.posix_acl_access",
        "system.posix_acl_default",
    ],
)
def test_other_namespaces_are_not_there(kv: Path, name: str) -> None:
    """[xattrs-other] Refused to set, absent to get and list, for root too."""
    (kv / "d").mkdir()
    value = MINIMAL_ACL if "acl" in name else b"\1\0\0\2" + bytes(16)
    for _ in range(2):
        with refused(EOPNOTSUPP):
            os.setxattr(kv / "d", name, value)
    with refused(ENODATA, EOPNOTSUPP):
        os.getxattr(kv / "d", name)
    assert os.listxattr(kv / "d") == []
