"""File handles on a mount (open_by_handle_at(2)), which NFS servers hold as long as they like.

Most of it after the kernel has forgotten all nodes: else it asks nobody what a handle leads to.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from errno import ESTALE
from pathlib import Path
from typing import Final

import pytest

from tests.support.clients.callers import Caller
from tests.support.kernel.caches import forget_names
from tests.support.kernel.calls import opened, read_file, refused, write_file
from tests.support.kernel.file_handles import FileHandle, opened_by
from tests.support.kernel.message_counts import counted, message_counter
from tests.support.mounts.mounting import Mounted, Reference, run_kvfs
from tests.support.mounts.places import blank_place, small_mount

pytestmark = pytest.mark.needs_fuse

MANY: Final = 2_000
#: Blocks, and directories, among which two pools have some of the same numbers.
SOME: Final = 32


def test_a_handle_leads_to_its_file_wherever_its_name_is(
    kv: Path, mounted: Mounted | Reference
) -> None:
    """[handles] Blocks and directories that were moved, and what a second mount finds."""
    (kv / "one" / "two").mkdir(parents=True)
    write_file(kv / "one" / "two" / "block", b"content")
    one, two = FileHandle.of(kv / "one"), FileHandle.of(kv / "one" / "two")
    block = FileHandle.of(kv / "one" / "two" / "block")
    os.rename(kv / "one" / "two" / "block", kv / "moved")
    os.rename(kv / "one" / "two", kv / "beside")
    for _ in range(2):
        with opened(kv.parent, os.O_RDONLY) as root_fd:
            forget_names(mounted.path)
            assert block.read(root_fd) == b"content"
            for handle, place in ((one, "one"), (two, "beside")):
                with opened_by(handle, root_fd) as fd:
                    assert os.readlink(f"/proc/self/fd/{fd}") == str(kv / place)


def test_handles_last_over_a_restart(kv: Path, mount: Mounted) -> None:
    """[handles] A clean one, and one after the server was killed."""
    (kv / "d").mkdir()
    write_file(kv / "d" / "kept", b"kept")
    write_file(kv / "gone", b"gone")
    handles = {name: FileHandle.of(kv / name) for name in ("d", "d/kept", "gone")}
    os.unlink(kv / "gone")
    for restart in (mount.remount, lambda: (mount.kill_daemon(), mount.start())):
        restart()
        write_file(kv / "other", b"other")
        with opened(mount.path, os.O_RDONLY) as root_fd:
            assert handles["d/kept"].read(root_fd) == b"kept"
            with opened_by(handles["d"], root_fd) as fd:
                assert os.listdir(fd) == ["kept"]
            with refused(ESTALE):
                handles["gone"].open(root_fd)


@pytest.mark.usefixtures("kvfs_only")
@pytest.mark.one_data_path
def test_a_directorys_handle_costs_the_same_in_a_large_directory(kv: Path, mount: Mounted) -> None:
    """[handles-directory] Counted in messages: one listing of one row for each level."""
    asked = {}
    for siblings in (0, MANY):
        parent = kv / f"{siblings}"
        parent.mkdir()
        for number in range(siblings):
            os.mknod(parent / f"{number}")
        (parent / "wanted").mkdir()
        handle = FileHandle.of(parent / "wanted")
        with opened(kv, os.O_RDONLY) as root_fd:
            forget_names(mount.path)
            with counted(mount) as found, opened_by(handle, root_fd) as fd:
                assert os.readlink(f"/proc/self/fd/{fd}") == str(parent / "wanted")
        asked[siblings] = found.asked
        shutil.rmtree(parent)
    assert asked[MANY] == asked[0]
    levels = "3 LOOKUP, 3 OPENDIR, 2 READDIRPLUS, 3 RELEASEDIR"
    assert asked[MANY] == message_counter(levels)


@pytest.mark.usefixtures("kvfs_only")
def test_the_handle_of_an_old_version_is_good_while_the_name_shows_it(
    kv: Path, mount: Mounted
) -> None:
    """[handles] Others are led to it until the rewrite is whole; then it is gone."""
    write_file(kv / "K", b"old")
    old = FileHandle.of(kv / "K")
    with opened(kv, os.O_RDONLY) as root_fd:
        with Caller() as writer:
            fd = writer.os("open", str(kv / "K"), os.O_WRONLY | os.O_TRUNC)
            writer.os("write", fd, b"new, ")
            forget_names(mount.path)
            assert read_file(kv / "K") == b"old"
            assert old.read(root_fd) == b"old"
            writer.os("write", fd, b"whole")
            writer.os("close", fd)
        forget_names(mount.path)
        assert read_file(kv / "K") == b"new, whole"
        assert FileHandle.of(kv / "K").read(root_fd) == b"new, whole"
        with refused(ESTALE):
            old.open(root_fd)


@pytest.mark.usefixtures("kvfs_only")
def test_an_evicted_block_does_not_open_by_its_handle(kv: Path, mount: Mounted) -> None:
    """[handles] ESTALE at once, by a handle that was used just before as well."""
    write_file(kv / "tmp", b"evicted")
    os.rename(kv / "tmp", kv / "K")
    handle = FileHandle.of(kv / "K")
    with opened(kv, os.O_RDONLY) as root_fd:
        assert handle.read(root_fd) == b"evicted"
        run_kvfs("evict", str(kv / "K"))
        for _ in range(2):
            with refused(ESTALE):
                handle.open(root_fd)
            forget_names(mount.path)


# ---- two pools ----


@pytest.fixture
def place() -> Iterator[Path]:
    with blank_place() as directory:
        yield directory


def mount_in(place: Path) -> Mounted:
    """Return a mount of *place*'s pool, not started yet, with an index that is quickly copied."""
    return small_mount(place, "--set", "index_preallocate_bytes=1M")


@contextlib.contextmanager
def pool_with(place: Path, name: str, content: bytes) -> Iterator[Mounted]:
    """Yield a mount of the pool *name* in *place*, with a directory and a block."""
    (place / name / "pool").mkdir(parents=True, exist_ok=True)
    (place / name / "kv").mkdir(exist_ok=True)
    with mount_in(place / name) as mount:
        (mount.path / "d").mkdir()
        write_file(mount.path / "d" / "K", content)
        yield mount


def handles_of(mount: Mounted) -> list[FileHandle]:
    """Return those of a block and of a directory."""
    return [FileHandle.of(mount.path / "d" / "K"), FileHandle.of(mount.path / "d")]


def many_handles_of(mount: Mounted) -> dict[int, FileHandle]:
    """Make blocks and directories, and return their handles by node.

    Most pools give their nodes the same numbers; some are those of extents that were not needed.
    """
    handles = handles_of(mount)
    for number in range(SOME):
        for path in (mount.path / f"d{number}", mount.path / f"K{number}"):
            path.mkdir() if path.name.startswith("d") else write_file(path, b"K")
            handles.append(FileHandle.of(path))
    return {handle.node[0]: handle for handle in handles}


def test_a_handle_of_one_pool_opens_nothing_in_another(place: Path) -> None:
    """[handles-pool] Two mounts at once, whose nodes have the same numbers, cold and warm."""
    with pool_with(place, "one", b"1") as one, pool_with(place, "two", b"2") as two:
        given = {mount: many_handles_of(mount) for mount in (one, two)}
        alike = given[one].keys() & given[two].keys()
        assert len(alike) > SOME
        for cold in (False, True):
            for mount, other in ((one, two), (two, one)):
                with opened(mount.path, os.O_RDONLY) as root_fd:
                    if cold:
                        forget_names(mount.path)
                    for node in alike:
                        with refused(ESTALE):
                            given[other][node].open(root_fd)
                    kept = handles_of(mount)[0]
                    assert kept.read(root_fd) == read_file(mount.path / "d" / "K")


def test_a_handle_opens_nothing_in_a_pool_made_anew_in_its_place(place: Path) -> None:
    """[handles-pool] The numbers begin again, the generation is another."""
    with pool_with(place, "one", b"former") as former:
        given = many_handles_of(former)
        with opened(former.path, os.O_RDONLY) as root_fd:
            assert handles_of(former)[0].read(root_fd) == b"former"
    shutil.rmtree(place / "one" / "pool")
    with pool_with(place, "one", b"anew") as anew:
        alike = given.keys() & many_handles_of(anew).keys()
        assert len(alike) > SOME
        with opened(anew.path, os.O_RDONLY) as root_fd:
            for cold in (False, True):
                if cold:
                    forget_names(anew.path)
                for node in alike:
                    with refused(ESTALE):
                        given[node].open(root_fd)
            assert handles_of(anew)[0].read(root_fd) == b"anew"


def test_a_copy_of_a_pool_shares_the_handles_of_what_was_copied_only(place: Path) -> None:
    """[handles-pool] Two copies do not share later ones either."""
    with pool_with(place, "one", b"copied") as one:
        (common, _) = handles_of(one)
        one.stop()
        for name in ("two", "three"):
            shutil.copytree(place / "one", place / name)
        one.start()
        with mount_in(place / "two") as two, mount_in(place / "three") as three:
            later = {}
            for mount in (one, two, three):
                write_file(mount.path / "later", str(mount.path).encode())
                later[mount] = FileHandle.of(mount.path / "later")
            for mount in (one, two, three):
                with opened(mount.path, os.O_RDONLY) as root_fd:
                    assert common.read(root_fd) == b"copied"
                    for other, handle in later.items():
                        if other is mount:
                            assert handle.read(root_fd) == str(mount.path).encode()
                            continue
                        with refused(ESTALE):
                            handle.open(root_fd)


def test_the_root_has_the_same_handle_in_every_pool(place: Path) -> None:
    """[handles-pool] Its node and its generation belong to the kernel."""
    with pool_with(place, "one", b"1") as one, pool_with(place, "two", b"2") as two:
        handle = FileHandle.of(one.path)
        assert handle == FileHandle.of(two.path)
        assert handle.node == (1, 0)
        for mount in (one, two):
            with opened(mount.path, os.O_RDONLY) as root_fd, opened_by(handle, root_fd) as fd:
                assert os.fstat(fd) == os.stat(mount.path)


def test_a_handle_is_not_made_from_another_by_counting(kv: Path, mount: Mounted) -> None:
    """[handles-secret] With the number of a block and the generation of another one."""
    for name in ("own", "others"):
        write_file(kv / name, name.encode())
    own, others = FileHandle.of(kv / "own"), FileHandle.of(kv / "others")
    made_up = own.at(others.node[0], own.node[1])
    with opened(mount.path, os.O_RDONLY) as root_fd:
        for _ in range(2):
            with refused(ESTALE):
                made_up.read(root_fd)
            assert others.read(root_fd) == b"others"
            forget_names(mount.path)
