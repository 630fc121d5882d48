"""Clones of a mount with mapped ids: the kernel maps and checks, and kvfs asks who its callers are.

Most requests name nobody there, and those that make something name the owner it will have.
"""

import contextlib
import errno
import os
import stat
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.core.errors import ToolMissing
from kvfs.core.types import ROOT_INODE
from mount.fuse.wire import FUSE_ALLOW_IDMAP, OPEN_IN, WRITE_IN, Opcode
from tests.fuse.conftest import require_passthrough
from tests.fuse.nfs.test_handle_lookups import Asker
from tests.fuse.space.test_open_shares import CLIENTS, CREATE, FEW_FILES, FILES, open_until_refused
from tests.support.clients.callers import Caller
from tests.support.kernel.calls import read_file, write_file
from tests.support.kernel.fake_kernel import WAIT_S, fake_kernel
from tests.support.kernel.id_maps import SHIFT, id_mapped, id_mapped_at, user_namespace
from tests.support.mounts.mounting import (
    CommandFailed,
    Mounted,
    mounted_at,
    skip_without_mounts,
    workplace,
)
from tests.support.store.readers_desk import Desk
from tests.support.store.stores import host

pytestmark = [pytest.mark.needs_fuse, pytest.mark.usefixtures("kvfs_only")]

MAPPED: Final = ("--set", "idmapped_mounts=true")
#: Two users as the pool stores them, each another one of the machine on the mapped clone.
OWNER, OTHER = 1000, 2000
POLICY: Final = "user.kvfs.evict"
SHARE: Final = 0.1


class Cloned:
    """A mount, and a clone of it with mapped ids."""

    def __init__(self, mount: Mounted, clone: Path, namespace_fd: int) -> None:
        self.mount = mount
        self.plain = mount.path
        self.clone = clone
        self.namespace_fd = namespace_fd

    @contextlib.contextmanager
    def root_inside(self) -> Iterator[Caller]:
        """Yield the root of the user namespace: it has all capabilities there, and none here."""
        place = f"--user=/proc/{os.getpid()}/fd/{self.namespace_fd}"
        with Caller(prefix=("nsenter", place, "--setuid", "0", "--setgid", "0")) as inside:
            yield inside


@contextlib.contextmanager
def cloned(data_path: str, *flags: str, prefix: tuple[str, ...] = ()) -> Iterator[Cloned]:
    skip_without_mounts()
    with workplace("disk") as place, workplace() as source, contextlib.ExitStack() as stack:
        (source / "pool").mkdir()
        options = (f"--data-path={data_path}", *MAPPED, *flags)
        made = Mounted(source / "pool", place / "kv", *options, prefix=prefix)
        mount = stack.enter_context(made)
        if data_path == "passthrough":
            require_passthrough(mount)
        os.chmod(mount.path, 0o1777)
        namespace_fd = stack.enter_context(user_namespace())
        clone = stack.enter_context(id_mapped_at(mount.path, place / "clone", namespace_fd))
        yield Cloned(mount, clone, namespace_fd)
        assert [line for line in mount.errors() if "starting it again" not in line] == []


@pytest.fixture(scope="module", params=["daemon", "passthrough"])
def both(request: pytest.FixtureRequest) -> Iterator[Cloned]:
    """Such a mount on each data path."""
    with cloned(request.param) as mounts:
        yield mounts


@pytest.fixture(scope="module")
def owner() -> Iterator[Caller]:
    """Who is OWNER on the clone."""
    with Caller(SHIFT + OWNER, SHIFT + OWNER) as caller:
        yield caller


@pytest.fixture(scope="module")
def other() -> Iterator[Caller]:
    """Who is OTHER on the clone."""
    with Caller(SHIFT + OTHER, SHIFT + OTHER) as caller:
        yield caller


@pytest.fixture
def own(both: Cloned, owner: Caller, request: pytest.FixtureRequest) -> Path:
    """A fresh directory of OWNER's on the clone."""
    path = both.clone / str(request.node.name)
    owner.os("mkdir", str(path), 0o755)
    return path


def store(caller: Caller, path: Path, content: bytes, flags: int = CREATE) -> None:
    fd = caller.os("open", str(path), flags, 0o644)
    assert caller.os("write", fd, content) == len(content)
    caller.os("close", fd)


def refused(caller: Caller, code: int, call: str, *arguments: object) -> None:
    with pytest.raises(OSError, match=f"Errno {code}\\b"):
        caller.os(call, *arguments)


def test_what_is_made_there_is_its_users(both: Cloned, own: Path, owner: Caller) -> None:
    """[id-mapped] Files, directories, links and fifos, by either path."""
    store(owner, own / "block.tmp", b"content")
    owner.os("rename", str(own / "block.tmp"), str(own / "block"))
    owner.os("mkdir", str(own / "directory"))
    owner.os("symlink", "block", str(own / "link"))
    owner.os("mkfifo", str(own / "fifo"))
    for name in ("block", "directory", "link", "fifo"):
        stored, shown = (os.lstat(top / own.name / name) for top in (both.plain, both.clone))
        assert (stored.st_uid, stored.st_gid) == (OWNER, OWNER)
        assert (shown.st_uid, shown.st_gid) == (SHIFT + OWNER, SHIFT + OWNER)
    assert read_file(own / "block") == read_file(both.plain / own.name / "block") == b"content"
    with Caller(OWNER, OWNER) as outside:  # who is nobody there
        refused(outside, errno.EOVERFLOW, "mkdir", str(both.clone / "theirs"))
        refused(outside, errno.EOVERFLOW, "open", str(both.clone / "theirs"), CREATE)
        refused(outside, errno.EACCES, "open", str(own / "block"), os.O_WRONLY)


def test_its_owner_may_and_others_may_not(
    both: Cloned, own: Path, owner: Caller, other: Caller
) -> None:
    """[id-mapped] chmod, rename, unlink, chown, writing, and O_TRUNC under a reader."""
    path, plain = own / "block", both.plain / own.name / "block"
    store(owner, path, b"first")
    for call, *arguments in (
        ("chmod", str(path), 0o666),
        ("chown", str(path), SHIFT + OTHER, -1),
    ):
        refused(other, errno.EPERM, call, *arguments)
    for call, *arguments in (
        ("open", str(path), os.O_WRONLY),
        ("open", str(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644),
        ("unlink", str(path)),
        ("rename", str(path), str(both.clone / "taken")),
    ):
        refused(other, errno.EACCES, call, *arguments)
    assert read_file(plain) == b"first"
    reader = other.os("open", str(path), os.O_RDONLY)
    for flags in (os.O_WRONLY | os.O_TRUNC, os.O_WRONLY | os.O_CREAT | os.O_TRUNC):
        store(owner, path, b"second", flags)
        assert read_file(plain) == read_file(path) == b"second"
    assert other.os("pread", reader, 9, 0) == b"first"
    other.os("close", reader)
    owner.os("chmod", str(path), 0o600)
    refused(other, errno.EACCES, "open", str(path), os.O_RDONLY)
    assert stat.S_IMODE(plain.stat().st_mode) == 0o600
    os.chown(path, SHIFT + OTHER, SHIFT + OTHER)
    assert (plain.stat().st_uid, plain.stat().st_gid) == (OTHER, OTHER)
    owner.os("rename", str(path), str(own / "renamed"))
    owner.os("unlink", str(own / "renamed"))
    assert os.listdir(own) == []


def test_a_log_that_two_begin_is_emptied_for_both(own: Path, owner: Caller) -> None:
    """[id-mapped] The second finds the version before, is led to the draft, and may empty it."""
    path = str(own / "app.log")
    store(owner, own / "app.log", b"yesterday")
    append, truncate = os.O_WRONLY | os.O_APPEND | os.O_TRUNC, os.O_WRONLY | os.O_TRUNC
    with Caller(owner.uid, owner.uid) as elsewhere:
        fd = owner.os("open", path, append)
        owner.os("write", fd, b"one\n")
        elsewhere.os("close", elsewhere.os("open", path, truncate))
        owner.os("write", fd, b"two\n")
        owner.os("close", fd)
    assert read_file(own / "app.log") == b"two\n"


def asked_to_store(asker: Asker, name: bytes) -> int:
    """Leave a block under *name* in the root, and return its node."""
    node, handle = asker.create(1, name)
    body = WRITE_IN.pack(handle, 0, 5, 0, 0, 0, 0) + b"bytes"
    assert asker.kernel.call(Opcode.WRITE, node, body).code == 0
    asker.close(node, handle)
    return node


#: FATTR_MODE, FATTR_UID and FATTR_GID of linux/fuse.h.
@pytest.mark.parametrize("changed", [0, 1, 2, 4], ids=["like it", "mode", "owner", "group"])
def test_a_second_try_empties_only_what_is_like_the_first(changed: int) -> None:
    """[id-mapped] Another's file comes to the name between the two tries of one open."""
    with fake_kernel(*MAPPED) as kernel:
        asker = Asker(kernel)
        own, another = (asked_to_store(asker, name) for name in (b"name", b"another"))
        attributes = (0o100600, 0, OTHER, OTHER, 0)
        body = struct.pack("<II48xIIIIIIII", changed, 0, 0, 0, 0, *attributes)
        assert not changed or kernel.call(Opcode.SETATTR, another, body).code == 0
        truncating = OPEN_IN.pack(os.O_WRONLY | os.O_TRUNC, 0)
        assert kernel.call(Opcode.OPEN, own, truncating).code == -errno.ESTALE
        thread, kernel.sender = kernel.sender, 1
        rename = struct.pack("<Q", 1) + b"another\0name\0"
        assert kernel.call(Opcode.RENAME, 1, rename).code == 0
        kernel.sender = thread
        assert (asker.lookup(1, b"name") == another) == bool(changed)


def test_an_open_that_another_server_did_counts_for_who_made_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """[id-mapped] That one was killed before it could note it, and the request names nobody."""
    with host() as machine, contextlib.closing(Desk(machine, monkeypatch)) as desk:
        desk.port.idmapped = True
        fh, _, _, _ = desk.files.create(ROOT_INODE, b"draft", 0o600, CREATE, OWNER, OWNER)
        handle = desk.handles.get(fh)
        assert handle.uid == 65534  # of a thread unknown
        handle.uid = -1
        with Caller(SHIFT + OWNER) as caller:
            caller.os("getpid")
            desk.files.own_again(handle, (1 << 32) - 1, caller.pid)
        assert handle.uid == SHIFT + OWNER
        desk.files.release(fh)


def test_policies_are_set_by_who_is_the_same_on_both(
    both: Cloned, own: Path, owner: Caller
) -> None:
    """[id-mapped] Root of the host, and the stored owner; attributes of his own anybody may set."""
    plain = both.plain / own.name
    refused(owner, errno.EPERM, "setxattr", str(own), POLICY, b"never")
    owner.os("setxattr", str(own), "user.a", b"b")
    owner.os("removexattr", str(own), "user.a")
    with Caller() as root, Caller(OWNER, OWNER) as outside:
        for caller, path in ((root, own), (root, plain), (outside, plain)):
            caller.os("setxattr", str(path), POLICY, b"never")
            refused(owner, errno.EPERM, "removexattr", str(own), POLICY)
            assert os.getxattr(own, POLICY) == b"never"
            caller.os("removexattr", str(path), POLICY)
    with Caller(OTHER, OTHER) as outside:
        refused(outside, errno.EACCES, "setxattr", str(plain), POLICY, b"never")
        os.chmod(plain, 0o777)
        refused(outside, errno.EPERM, "setxattr", str(plain), POLICY, b"never")


def test_root_of_a_user_namespace_is_not_root(both: Cloned) -> None:
    """[id-mapped] What it makes there is root's, and it sets no policy, not even of its own."""
    path = both.clone / "of-root-inside"
    with both.root_inside() as inside:
        inside.os("mkdir", str(path))
        assert (both.plain / path.name).stat().st_uid == 0
        inside.os("setxattr", str(path), "user.a", b"b")
        refused(inside, errno.EPERM, "setxattr", str(path), POLICY, b"never")
        os.setxattr(path, POLICY, b"never")
        refused(inside, errno.EPERM, "removexattr", str(path), POLICY)
        store(inside, path / "block", b"content")
        inside.os("chown", str(path / "block"), OWNER, OWNER)
    assert (both.plain / path.name / "block").stat().st_uid == OWNER


def test_a_user_who_has_no_number_is_no_owner(both: Cloned) -> None:
    """[id-mapped] 65534 stands for those too, so who owns files by it sets no policy."""
    path = both.plain / "of-nobody"
    with Caller(65534, 65534) as nobody:
        nobody.os("mkdir", str(path))
        refused(nobody, errno.EPERM, "setxattr", str(path), POLICY, b"never")


@pytest.mark.parametrize("data_path", ["daemon", "passthrough"])
def test_open_files_count_for_who_has_them(data_path: str) -> None:
    """[id-mapped] Whoever they are there: root inside has a share like all, and root has the rest.

    A server that takes over knows whose they are, and that requests name nobody.
    """
    few = ("--set", f"open_files_max={FILES}", "--set", f"open_files_user_share={SHARE}")
    with cloned(data_path, *few, prefix=FEW_FILES) as mounts, contextlib.ExitStack() as stack:
        share = int(CLIENTS * SHARE)
        inside = stack.enter_context(mounts.root_inside())
        owner = stack.enter_context(Caller(SHIFT + OWNER, SHIFT + OWNER))
        held, code = open_until_refused(inside, mounts.clone / "inside")
        assert (len(held), code) == (share, errno.EMFILE)
        # Made, opened again, and on the plain mount: it is one share.
        for number in range(share // 3):
            path = str(mounts.clone / f"own-{number}")
            owner.os("open", path, CREATE, 0o644)
            owner.os("open", path, os.O_WRONLY)
        rest, code = open_until_refused(owner, mounts.plain / "plain")
        assert (len(rest), code) == (share - share // 3 * 2, errno.EMFILE)
        with Caller() as root, Caller(OWNER, OWNER) as outside:
            for caller in (root, outside):
                store(caller, mounts.plain / f"of-{caller.uid}", b"content")
        mounts.mount.kill_server()
        mounts.mount.follow_server()
        assert mounts.mount.status()["idmapped_mounts"]
        for caller in (inside, owner):
            refused(caller, errno.EMFILE, "open", str(mounts.clone / "own-0"), os.O_WRONLY)
        inside.os("close", held.pop())
        store(inside, mounts.clone / "again", b"content")
        refused(inside, errno.EPERM, "setxattr", str(mounts.clone / "again"), "user.kvfs.pin", b"1")
        assert id_mapped(mounts.plain, mounts.namespace_fd) == 0


def test_a_mount_that_comes_later_is_not_mapped() -> None:
    """[id-mapped] Into the id-mapped volume of a running pod, above whose top it is made."""
    skip_without_mounts()
    with contextlib.ExitStack() as stack:
        place, source = (stack.enter_context(workplace(kind)) for kind in ("disk", "tmpfs"))
        (source / "pool").mkdir()
        node = stack.enter_context(mounted_at(place / "node", "-t", "tmpfs", "kvfs-test"))
        subprocess.run(["mount", "--make-shared", node], check=True)
        namespace_fd = stack.enter_context(user_namespace())
        pod = stack.enter_context(id_mapped_at(node, place / "pod", namespace_fd))
        subprocess.run(["mount", "--make-slave", pod], check=True)
        mount = stack.enter_context(Mounted(source / "pool", node / "kv", *MAPPED))
        write_file(mount.path / "block", b"content")
        mapped = stack.enter_context(id_mapped_at(mount.path, place / "mapped", namespace_fd))
        assert (mapped / "block").stat().st_uid == SHIFT
        assert (pod / "kv" / "block").stat().st_uid == 0


def test_a_kernel_without_it_is_told() -> None:
    """[id-mapped] The setting asks for what this kernel cannot do: there is no mount."""
    with fake_kernel(*MAPPED) as kernel:
        kernel.init(~FUSE_ALLOW_IDMAP & (1 << 64) - 1)
        assert kernel.server.wait(WAIT_S) == ToolMissing.exit_code
        assert "idmapped_mounts needs Linux 6.12 or later" in kernel.log_file.read_text()


def test_who_would_be_taken_for_others_is_told(tmp_path: Path) -> None:
    """[id-mapped] In a pid namespace with the /proc of another the numbers are other processes'."""
    skip_without_mounts()
    (tmp_path / "pool").mkdir()
    alone = ("unshare", "--pid", "--fork")
    mount = Mounted(tmp_path / "pool", tmp_path / "kv", *MAPPED, prefix=alone)
    with pytest.raises(CommandFailed, match="idmapped_mounts needs the /proc"), mount:
        pass
    assert not os.path.ismount(tmp_path / "kv")


def test_without_the_setting_requests_name_users(kv: Path, mount: Mounted) -> None:
    """[id-mapped] 65534 is a user like others, and the status says that nothing is mapped."""
    assert not mount.status()["idmapped_mounts"]
    os.chmod(kv, 0o777)
    with Caller(65534, 65534) as nobody:
        nobody.os("mkdir", str(kv / "own"))
        nobody.os("setxattr", str(kv / "own"), POLICY, b"never")
    write_file(kv / "block", b"content")
