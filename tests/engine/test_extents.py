"""Extents on the file systems they are made for: XFS, ext4 and tmpfs, each a real one."""

import contextlib
import errno
import itertools
import os
import stat
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvfs.core.errors import Damaged, NoSpace
from kvfs.core.pool_layout import FAN_OUT, file_name, parse_file_name
from kvfs.core.records import Identity
from kvfs.core.types import NAME_MAX_BYTES, TARGET_MAX_BYTES, InodeNo, Sequence, round_up
from kvfs.devices import open_source
from kvfs.devices.detached import mount_detached
from kvfs.storage.extent_bytes import lacks_bytes
from kvfs.storage.extents import Extents
from kvfs.storage.file_xattrs import XATTR_FIXED, XATTR_NAME
from kvfs.storage.syscalls import FALLOC_FL_KEEP_SIZE, Syscalls
from tests.support.devices.failing_syscalls import FailingSyscalls
from tests.support.devices.loop import loop_device
from tests.support.devices.pools import format_source
from tests.support.kernel.extent_map import runs_of
from tests.support.mounts.mounting import workplace

MIB = 1 << 20
DRIVE_BYTES = 1 << 30

#: Every test takes numbers of its own, on a pool directory that all tests of a file system share.
numbers = map(InodeNo, itertools.count(16))


class Place:
    """A pool directory, and the extents in it by the system calls of choice."""

    def __init__(self, pool_fd: int, fs_type: str) -> None:
        self.pool_fd = pool_fd
        self.fs_type = fs_type

    @contextlib.contextmanager
    def extents(self, syscalls: Syscalls | None = None) -> Iterator[Extents]:
        extents = Extents((self.pool_fd,), syscalls or Syscalls(), self.fs_type)
        try:
            yield extents
        finally:
            extents.close()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("xfs", marks=pytest.mark.needs_loop),
        pytest.param("ext4", marks=pytest.mark.needs_loop),
        "tmpfs",
    ],
)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with contextlib.ExitStack() as stack:
        if request.param == "tmpfs":
            pool_fd = os.open(stack.enter_context(workplace()), os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, pool_fd)
        elif request.param == "xfs":
            drive = stack.enter_context(loop_device(DRIVE_BYTES))
            format_source(drive.path)
            pool_fd = stack.enter_context(open_source(drive.path)).pool_fd
        else:
            drive = stack.enter_context(loop_device(DRIVE_BYTES))
            subprocess.run(["mkfs.ext4", "-q", drive.path], check=True)
            mount_fd = mount_detached("ext4", drive.path, {}, (), 0)
            stack.callback(os.close, mount_fd)
            pool_fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=mount_fd)
            stack.callback(os.close, pool_fd)
        yield Place(pool_fd, request.param)


@pytest.fixture
def extents(place: Place) -> Iterator[Extents]:
    with place.extents() as extents:
        yield extents


def identity_of(ino: InodeNo, name: bytes = b"block", mode: int = stat.S_IFREG) -> Identity:
    return Identity(ino, InodeNo(1), Sequence(77), mode | 0o644, 5, 6, 1234, -7, 0, 0, name)


@contextlib.contextmanager
def created(extents: Extents, reserve_bytes: int = 0) -> Iterator[tuple[InodeNo, int]]:
    ino = next(numbers)
    fd = extents.create(ino, reserve_bytes)
    try:
        yield ino, fd
    finally:
        os.close(fd)
        extents.unlink(ino)


# ---- blocks ----


def test_a_new_extent_is_empty_and_holds_what_was_reserved(extents: Extents) -> None:
    with created(extents, 3 * MIB) as (ino, fd):
        status = os.fstat(fd)
        assert (status.st_size, status.st_uid, stat.S_IMODE(status.st_mode)) == (0, 0, 0o600)
        assert extents.allocated_bytes(fd) == 3 * MIB
        assert extents.stat(ino) == status
        assert os.pwrite(fd, b"x", 0) == 1, "the fd is writable"
        assert os.pread(fd, 2, 0) == b"x", "and readable"


def test_allocating_takes_what_is_missing_and_no_more_room(extents: Extents, place: Place) -> None:
    """Also where what is there already would not fit a second time (XFS sets it aside again)."""
    length_bytes = 64 * MIB
    with created(extents, length_bytes // 2) as (_, fd), created(extents) as (_, filler):
        os.pwrite(fd, b"k" * MIB, 8 * MIB)  # promised in memory, or in its place
        free_bytes = os.statvfs(fd).f_bavail * os.statvfs(fd).f_frsize
        if place.fs_type == "xfs":
            os.posix_fallocate(filler, 0, free_bytes - length_bytes // 2 - 8 * MIB)
        extents.allocate(fd, 0, MIB + 5, length_bytes - MIB)
        assert os.fstat(fd).st_size == length_bytes + 5
        assert extents.allocated_bytes(fd) == length_bytes + 4096
        assert os.pread(fd, MIB, 8 * MIB) == b"k" * MIB
        os.ftruncate(fd, 2 * length_bytes)
        extents.allocate(fd, 0, 0, length_bytes)
        assert os.fstat(fd).st_size == 2 * length_bytes, "it makes nothing shorter"


def test_holes_among_blocks_are_filled(extents: Extents) -> None:
    with created(extents) as (_, fd):
        for at in range(0, 600, 2):  # more than are told at a time
            os.pwrite(fd, b"%d" % at, at * 4096)
            if not at % 100:
                os.fsync(fd)  # some are allocated, the others promised
        extents.allocate(fd, FALLOC_FL_KEEP_SIZE, 4096, 700 * 4096)
        os.fsync(fd)
        assert 701 <= extents.allocated_bytes(fd) // 4096 <= 704  # ext4 counts its own blocks, too
        assert os.fstat(fd).st_size == 598 * 4096 + 3
        assert [os.pread(fd, 4, at * 4096)[:3].rstrip(b"\0") for at in (0, 2, 598)] == [
            b"0",
            b"2",
            b"598",
        ]


def test_a_reserve_is_given_back_where_nothing_was_written(extents: Extents) -> None:
    """Bytes that are only in memory yet stay, and those on the drive, and all blocks of both."""
    size_bytes = 40 * MIB + 5
    with created(extents, 8 * MIB) as (_, fd):
        for at in (3, MIB, 6 * MIB + 100, size_bytes - 5):
            os.pwrite(fd, b"bytes", at)
            if at == MIB:
                os.fsync(fd)
        held_bytes = extents.trim_holes(fd, size_bytes)
        assert held_bytes == extents.allocated_bytes(fd)
        assert 4 * 4096 <= held_bytes <= 40 * 4096
        os.fsync(fd)
        assert os.fstat(fd).st_size == size_bytes
        found = os.pread(fd, size_bytes, 0)
        assert found.count(b"bytes") == 4
        assert [found.find(b"bytes", at) for at in (0, MIB, 6 * MIB, 8 * MIB)] == [
            3,
            MIB,
            6 * MIB + 100,
            size_bytes - 5,
        ]
        assert found.count(b"\0") == size_bytes - 20


def test_what_holds_no_reserve_keeps_its_holes_and_its_bytes(extents: Extents) -> None:
    with created(extents) as (_, fd):
        for number in range(600):
            os.pwrite(fd, b"%04d" % number * 1024, number * 3 * 4096)
        size_bytes = os.fstat(fd).st_size
        extents.trim_holes(fd, size_bytes)
        for number in range(600):
            assert os.pread(fd, 4096, number * 3 * 4096) == b"%04d" % number * 1024


def test_an_extent_without_bytes_holds_no_blocks(extents: Extents) -> None:
    with created(extents) as (_, fd):
        assert extents.allocated_bytes(fd) == 0
    with created(extents, 32 * MIB) as (_, fd):
        assert extents.trim(fd, 0) == 0


@pytest.mark.parametrize("size_bytes", [1, 4095, 4096, 4097, 5000, MIB - 1, MIB, 4 * MIB])
def test_after_trim_an_extent_holds_exactly_its_bytes(extents: Extents, size_bytes: int) -> None:
    data = bytes(range(1, 251)) * (size_bytes // 250 + 1)
    data = data[:size_bytes]
    with created(extents, 4 * MIB) as (_, fd):
        assert os.pwrite(fd, data, 0) == size_bytes
        assert extents.trim(fd, size_bytes) == round_up(size_bytes)
        assert os.pread(fd, size_bytes + 1, 0) == data
        os.fsync(fd)
        assert extents.allocated_bytes(fd) == round_up(size_bytes)


def test_trim_without_a_reserve_takes_what_the_file_system_preallocated(extents: Extents) -> None:
    with created(extents) as (_, fd):
        for offset_bytes in range(0, 3 * MIB, MIB // 4):
            os.pwrite(fd, b"k" * (MIB // 4), offset_bytes)
        assert extents.trim(fd, 3 * MIB) == 3 * MIB


def test_trim_of_a_huge_sparse_file_costs_nothing(extents: Extents) -> None:
    size_bytes = (1 << 43) + 5
    with created(extents, MIB) as (_, fd):
        os.ftruncate(fd, size_bytes)
        os.pwrite(fd, b"end", size_bytes - 3)
        assert extents.trim(fd, size_bytes) <= MIB + 3 * 4096
        assert os.fstat(fd).st_size == size_bytes
        assert os.pread(fd, 9, size_bytes - 3) == b"end"


@pytest.mark.needs_loop
@pytest.mark.parametrize("reserve_bytes", [32 * MIB, 0], ids=["reserved", "grown"])
def test_on_a_fresh_xfs_a_block_is_one_run_of_the_drive(reserve_bytes: int) -> None:
    with loop_device(DRIVE_BYTES) as drive:
        format_source(drive.path)
        with (
            open_source(drive.path) as device,
            Place(device.pool_fd, "xfs").extents() as extents,
            created(extents, reserve_bytes) as (_, fd),
        ):
            for offset_bytes in range(0, 32 * MIB, MIB):
                os.pwrite(fd, b"k" * MIB, offset_bytes)
            assert extents.trim(fd, 32 * MIB) == 32 * MIB
            (run,) = runs_of(fd)
            assert (run.logical_bytes, run.length_bytes) == (0, 32 * MIB)


# ---- names ----


def test_an_inode_number_is_never_used_twice(extents: Extents) -> None:
    with created(extents) as (ino, fd):
        os.pwrite(fd, b"first", 0)
        with pytest.raises(Damaged, match="exists"):
            extents.create(ino, MIB)
        assert os.pread(fd, 9, 0) == b"first"
        assert extents.stat(ino) is not None


def test_an_unlinked_extent_stays_readable_until_its_last_close(extents: Extents) -> None:
    with created(extents) as (ino, fd):
        os.pwrite(fd, b"bytes", 0)
        extents.unlink(ino)
        assert os.pread(fd, 9, 0) == b"bytes"
        assert extents.stat(ino) is None
        extents.unlink(ino)  # and once more, which is fine


def test_a_missing_extent_is_damage(extents: Extents) -> None:
    ino = next(numbers)
    with pytest.raises(Damaged, match="missing"):
        extents.open(ino, os.O_RDONLY)


def test_open_gives_the_mode_that_was_asked_for(extents: Extents) -> None:
    with created(extents) as (ino, _):
        fd = extents.open(ino, os.O_RDONLY)
        with contextlib.closing(os.fdopen(fd, "rb")), pytest.raises(OSError, match="Bad file"):
            os.pwrite(fd, b"x", 0)


def test_scan_finds_every_extent_and_nothing_else(place: Place, extents: Extents) -> None:
    fds = {ino: extents.create(ino, 0) for ino in itertools.islice(numbers, 2 * FAN_OUT + 3)}
    stranger = os.open("extents/00/STRANGER", os.O_CREAT | os.O_WRONLY, dir_fd=place.pool_fd)
    for fd in (*fds.values(), stranger):
        os.close(fd)
    assert sorted(extents.scan()) == sorted(fds)
    os.unlink("extents/00/STRANGER", dir_fd=place.pool_fd)
    for ino in fds:
        extents.unlink(ino)
    assert list(extents.scan()) == []


def test_threads_create_in_directories_that_are_not_there_yet() -> None:
    chosen = list(itertools.islice(numbers, 2 * FAN_OUT))
    with contextlib.ExitStack() as stack:
        pool_fd = os.open(stack.enter_context(workplace()), os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, pool_fd)
        extents = stack.enter_context(Place(pool_fd, "tmpfs").extents())
        with ThreadPoolExecutor(8) as threads:
            for fd in threads.map(lambda ino: extents.create(ino, 0), chosen):
                os.close(fd)
        assert sorted(extents.scan()) == chosen


@pytest.mark.parametrize(
    "name", ["", "1", "G" * 16, "00000000000000AB", "0x00000000000001", "é" * 16]
)
def test_only_kvfs_names_are_inode_numbers(name: str) -> None:
    assert parse_file_name(name) is None


@pytest.mark.parametrize("ino", [1, 16, 0xFF, (1 << 63) - 1])
def test_a_file_name_tells_its_inode_number(ino: int) -> None:
    assert parse_file_name(file_name(InodeNo(ino))) == ino


# ---- identities ----


def test_an_identity_outlives_the_process_that_wrote_it(place: Place) -> None:
    with place.extents() as extents, created(extents) as (ino, fd):
        wanted = identity_of(ino, name=b"\xff" * NAME_MAX_BYTES)
        assert extents.identity(ino) is None
        assert extents.identify(ino, wanted)
        with place.extents() as again:
            assert again.identity(ino) == wanted
        replaced = wanted._replace(name=b"n", sequence=Sequence((1 << 63) - 1))
        assert extents.identify(ino, replaced, fd=fd)
        assert extents.identity(ino) == replaced


def test_an_identity_is_two_small_xattrs_that_fit_the_inode(place: Place) -> None:
    syscalls = FailingSyscalls(["setxattr"])
    with place.extents(syscalls) as extents, created(extents) as (ino, fd):
        extents.identify(ino, identity_of(ino, name=b"n" * (NAME_MAX_BYTES - 1)))
        assert syscalls.calls == 2
        assert {XATTR_FIXED, XATTR_NAME} <= set(os.listxattr(fd))
        os.fsync(fd)
        if place.fs_type != "ext4":  # whose inodes have no room for it: a block more
            assert extents.allocated_bytes(fd) == 0
        extents.identify(ino, identity_of(ino, name=b"n" * NAME_MAX_BYTES))
        assert all(len(os.getxattr(fd, name)) <= 255 for name in (XATTR_FIXED, XATTR_NAME))


@pytest.mark.parametrize("cuts", list(itertools.product(range(5), range(5))), ids=str)
def test_an_identity_is_the_old_or_the_new_one_at_every_moment(
    place: Place, cuts: tuple[int, int]
) -> None:
    """Also where the change before was cut short, and of a name that comes back."""
    with place.extents() as extents, created(extents) as (ino, _):
        said = [identity_of(ino, name=name) for name in (b"one", b"two", b"three", b"one")]
        said = [one._replace(sequence=Sequence(at)) for at, one in enumerate(said)]
        extents.identify(ino, said[0])
        before = said[0]
        for calls, identity in zip((*cuts, 4), said[1:], strict=True):
            # After so many calls the power goes; the last change is carried out.
            syscalls = FailingSyscalls(["setxattr", "removexattr"], fail_at=calls + 2)
            with place.extents(syscalls) as failing, contextlib.suppress(OSError):
                failing.identify(ino, identity)
            found = extents.identity(ino)
            assert found in (before, identity)
            before = found
        assert before == said[-1]


def test_half_an_identity_is_damage(place: Place) -> None:
    """A file without the name that its fixed part is over, as an older kvfs left it."""
    with place.extents() as extents, created(extents) as (ino, fd):
        extents.identify(ino, identity_of(ino, name=b"before"))
        os.setxattr(fd, XATTR_NAME, b"after")
        with pytest.raises(Damaged):
            extents.identity(ino)
        extents.identify(ino, identity_of(ino, name=b"healed"))
        assert extents.identity(ino) == identity_of(ino, name=b"healed")


def test_an_extent_that_claims_to_be_another_is_damage(extents: Extents) -> None:
    with created(extents) as (ino, _):
        extents.identify(ino, identity_of(next(numbers)))
        with pytest.raises(Damaged, match="carries"):
            extents.identity(ino)


def test_what_is_gone_is_neither_identified_nor_found(extents: Extents) -> None:
    ino = next(numbers)
    assert not extents.identify(ino, identity_of(ino))
    assert extents.identity(ino) is None
    assert extents.node(ino) is None
    extents.forget_node(ino)


@pytest.mark.parametrize("target", [b"a", b"\xff" * TARGET_MAX_BYTES], ids=["short", "longest"])
def test_a_symlink_is_known_with_its_target(place: Place, target: bytes) -> None:
    with place.extents() as extents:
        ino = next(numbers)
        link = identity_of(ino, mode=stat.S_IFLNK)
        extents.identify_node(ino, link, target)
        moved = link._replace(name=b"moved", sequence=Sequence(78))
        extents.identify_node(ino, moved, target)
        with place.extents() as again:
            assert again.node(ino) == (moved, target)
        assert list(extents.scan_nodes()) == [ino]
        fd = os.open(
            f"identities/{ino & 0xFF:02x}/{file_name(ino)}", os.O_WRONLY, dir_fd=place.pool_fd
        )
        os.pwrite(fd, b"b", 0)
        os.close(fd)
        with pytest.raises(Damaged):
            extents.node(ino)
        extents.forget_node(ino)
        assert list(extents.scan_nodes()) == []


def test_a_directory_is_known_by_its_identity_file(extents: Extents) -> None:
    ino = next(numbers)
    directory = identity_of(ino, mode=stat.S_IFDIR)
    extents.identify_node(ino, directory)
    assert extents.node(ino) == (directory, b"")
    extents.forget_node(ino)


# ---- failing calls ----


@pytest.mark.parametrize("error_no", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_a_failed_create_leaves_nothing(place: Place, fail_at: int, error_no: int) -> None:
    with place.extents() as before, created(before) as (first, _):
        ino = InodeNo(first + FAN_OUT * 1000)  # in a directory that is there
    failing = FailingSyscalls(["open", "fallocate"], fail_at, error_no)
    expected = OSError if error_no == errno.EIO else NoSpace
    with place.extents(failing) as extents:
        with pytest.raises(expected):
            extents.create(ino, MIB)
        assert failing.failed == 1
        assert extents.stat(ino) is None
    with place.extents() as after, contextlib.closing(os.fdopen(after.create(ino, MIB), "rb")):
        after.unlink(ino)


@pytest.mark.parametrize("name", ["open", "pwrite", "ftruncate", "setxattr"])
def test_a_full_device_refuses_an_identity_file(place: Place, name: str) -> None:
    ino = next(numbers)
    with place.extents(FailingSyscalls([name], 1, errno.ENOSPC)) as extents:
        with pytest.raises(NoSpace):
            extents.identify_node(ino, identity_of(ino, mode=stat.S_IFLNK), b"target")
        extents.forget_node(ino)


def test_what_was_never_written_lacks_bytes_whoever_read_it(extents: Extents, place: Place) -> None:
    """A hole, and what is reserved: SEEK_HOLE takes what was read of that for data."""
    page, syscalls = b"x" * 4096, Syscalls()
    with created(extents) as (_, fd):
        assert not lacks_bytes(syscalls, fd, 0)
        os.pwrite(fd, page * 4, 0)
        assert not lacks_bytes(syscalls, fd, 4 * 4096)
        os.pwrite(fd, b"z", 8 * 4096)
        assert lacks_bytes(syscalls, fd, 8 * 4096 + 1)
        syscalls.fallocate(fd, 0, 0, 8 * 4096)
        if place.fs_type != "tmpfs":  # which has no drive to tell
            os.pread(fd, 9 * 4096, 0)
        assert lacks_bytes(syscalls, fd, 8 * 4096 + 1)
        os.pwrite(fd, page * 4, 4 * 4096)
        assert not lacks_bytes(syscalls, fd, 8 * 4096 + 1)
