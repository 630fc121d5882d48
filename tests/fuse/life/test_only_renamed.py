"""Directories with ``user.kvfs.publish`` = ``rename`` on a mount, with processes that look."""

import errno
import os
import stat
from pathlib import Path

import pytest

from tests.support.clients.callers import Caller
from tests.support.clients.stamped import state
from tests.support.clients.stepping import until
from tests.support.kernel.calls import read_file, refused
from tests.support.mounts.mounting import Mounted

pytestmark = pytest.mark.usefixtures("kvfs_only")
CREATE = os.O_WRONLY | os.O_CREAT


@pytest.fixture
def strict(kv: Path) -> Path:
    """A directory in which only a rename publishes."""
    os.mkdir(kv / "strict")
    os.setxattr(kv / "strict", "user.kvfs.publish", b"rename")
    return kv / "strict"


def store_by(writer: Caller, path: Path, data: bytes = b"bytes") -> None:
    """Have *writer* create, write and close *path*."""
    fd = writer.os("open", str(path), CREATE | os.O_EXCL, 0o644)
    writer.os("write", fd, data)
    writer.os("close", fd)


def assert_hidden(path: Path) -> None:
    """This process finds it in no way, and takes nothing from it."""
    for _ in range(3):
        assert not path.exists()
        assert path.name not in os.listdir(path.parent)
        with refused(errno.ENOENT):
            os.open(path, os.O_RDONLY)
        with refused(errno.ENOENT):
            os.rename(path, path.with_suffix(".stolen"))
        with refused(errno.EACCES):
            os.open(path, CREATE)


@pytest.mark.parametrize("temporary", ["K.tmp", "part"])
def test_a_rename_publishes_and_nothing_else_does(strict: Path, temporary: str) -> None:
    """[life-publish-rename]"""
    with Caller() as writer:
        path = strict / temporary
        store_by(writer, path)
        assert_hidden(path)
        assert writer.os("stat", str(path)).st_size == 5
        assert writer.os("listdir", str(strict)) == [temporary]
        writer.os("rename", str(path), str(strict / "K"))
        assert read_file(strict / "K") == b"bytes"
        assert state(strict / "K") == "published"
    assert read_file(strict / "K") == b"bytes"


def test_what_is_not_renamed_ends_with_its_process(strict: Path) -> None:
    """[life-publish-rename] A file that mknod(2) made, too, and one in a directory below."""
    os.mkdir(strict / "below")
    paths = [strict / "K", strict / "below" / "K.tmp", strict / "node"]
    with Caller() as writer:
        for path in paths[:2]:
            store_by(writer, path)
        writer.os("mknod", str(paths[2]), stat.S_IFREG | 0o644)
        for path in paths:
            assert_hidden(path)
            assert writer.os("access", str(path), os.F_OK)
    with Caller() as other:
        for path in paths:
            until(lambda path=path: may_create(other, path), f"{path} is gone", 10)


def may_create(other: Caller, path: Path) -> bool:
    """Whether *path* is free: what is hidden refuses others."""
    try:
        other.os("close", other.os("open", str(path), CREATE | os.O_EXCL, 0o644))
        other.os("unlink", str(path))
    except FileExistsError:
        return False
    return True


def test_a_killed_server_keeps_it_for_its_maker(mount: Mounted) -> None:
    """[life-publish-rename] Which renames it, or takes it along."""
    strict = mount.path / "strict"
    os.mkdir(strict)
    os.setxattr(strict, "user.kvfs.publish", b"rename")
    with Caller() as writer:
        for name in ("part", "L"):
            store_by(writer, strict / name)
        until(lambda: mount.status()["open_inodes"] == 0, "the server has heard of the closes")
        mount.kill_daemon()
        mount.start()
        for name in ("part", "L"):
            assert_hidden(strict / name)
        writer.os("rename", str(strict / "part"), str(strict / "K"))
        assert read_file(strict / "K") == b"bytes"
    with Caller() as other:
        until(lambda: may_create(other, strict / "L"), "it is gone", 10)
    assert read_file(strict / "K") == b"bytes"
