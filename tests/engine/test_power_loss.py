"""A real XFS loses power: what comes back is whole, and what was synced comes back."""

import contextlib
import os
import stat
from collections.abc import Callable, Iterator

import pytest

from kvfs.core.errors import IndexDamaged, NotFound
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.devices import open_source, wait_released
from kvfs.devices.xfs_tools import is_cut_off_noted
from kvfs.machine.processes import SERVER
from kvfs.storage.run_state import read_run_state
from kvfs.storage.syscalls import Syscalls
from tests.support.devices.power_cuts.power import Cut, Drive, drive, write_back
from tests.support.store.driven import Driven, Opened
from tests.support.store.stores import DIRECTORY, assert_no_strays, get, put, settle, tree, write

pytestmark = [pytest.mark.needs_loop, pytest.mark.usefixtures("caplog")]

SIZES_BYTES = (0, 100, 5000, 100_000, 1_000_000)
#: Of many folios: XFS writes back whole ones.
LARGE_BYTES = 16 << 20


@pytest.fixture
def powered() -> Iterator[Drive]:
    with drive() as made:
        made.start()
        yield made


def content(number: int, size_bytes: int) -> bytes:
    return number.to_bytes(2, "little") * (size_bytes // 2)


def store_some(store: Driven, prefix: bytes) -> dict[bytes, bytes]:
    """Store blocks of all sizes, half of them by way of a temporary name."""
    stored = {}
    for number, size_bytes in enumerate(SIZES_BYTES * 4):
        name = b"%s%d" % (prefix, number)
        stored[name] = content(number, size_bytes)
        if number % 2:
            put(store, ROOT_INODE, name + b".tmp", stored[name])
            store.rename(ROOT_INODE, name + b".tmp", ROOT_INODE, name)
        else:
            put(store, ROOT_INODE, name, stored[name])
    return stored


@pytest.mark.parametrize("cut", Cut, ids=lambda cut: cut.name)
def test_what_was_synced_comes_back_and_nothing_else_comes_back_wrong(
    powered: Drive, cut: Cut
) -> None:
    store = powered.store
    synced = store_some(store, b"synced ")
    directory, _ = store.make_node(ROOT_INODE, b"dir", DIRECTORY, 0, 0)
    put(store, directory, b"in", b"inside")
    store.sync()
    late = store_some(store, b"late ")
    settle(store)
    for number, name in enumerate(late):
        fd = store.open_extent(store.lookup(ROOT_INODE, name), os.O_RDWR)
        half_bytes = len(late[name]) // 2
        write_back(fd, half_bytes * (number % 2), half_bytes)
        os.close(fd)
    powered.cut(cut)

    store = powered.start()
    found = tree(store)
    assert {path: found.get(b"/" + path) for path in synced} == synced
    assert found[b"/dir/in"] == b"inside"
    for name, data in late.items():
        assert found.get(b"/" + name, data) == data
    settle(store)
    assert_no_strays(store)
    put(store, ROOT_INODE, b"next", b"n" * 5000)
    powered.stop()
    assert powered.problems() == []


def test_a_size_that_came_before_its_bytes_is_no_block(powered: Drive) -> None:
    """XFS writes the size after any part of a file. The second line behind the identity."""
    store = powered.store
    put(store, ROOT_INODE, b"whole", b"w" * LARGE_BYTES)
    put(store, ROOT_INODE, b"torn", b"t" * LARGE_BYTES)
    for name in (b"whole", b"torn"):  # as if a drive had lost what it acknowledged
        store.identify(store.lookup(ROOT_INODE, name))
    for name, from_bytes in ((b"whole", 0), (b"torn", LARGE_BYTES // 2)):
        fd = store.open_extent(store.lookup(ROOT_INODE, name), os.O_RDWR)
        write_back(fd, from_bytes, LARGE_BYTES - from_bytes)
        os.close(fd)
    torn = store.lookup(ROOT_INODE, b"torn")
    powered.cut(Cut.LOG_ONLY)

    with open_source(str(powered.path)) as device:
        path = f"/proc/self/fd/{device.pool_fd}/extents/{torn & 0xFF:02x}/{torn:016x}"
        assert os.stat(path).st_size == LARGE_BYTES
    store = powered.start()
    assert get(store, ROOT_INODE, b"whole") == b"w" * LARGE_BYTES
    with pytest.raises(NotFound):
        store.lookup(ROOT_INODE, b"torn")


def overwrite(store: Driven, name: bytes, data: bytes) -> Opened:
    """Open a block in place as the mount does, and have half of *data* on the device."""
    return overwrite_inode(store, store.lookup(ROOT_INODE, name), data)


def overwrite_inode(store: Driven, ino: InodeNo, data: bytes) -> Opened:
    opened = store.open(ino, writer=True, truncate=False)
    if store.must_forget(opened):
        store.forget_durably(opened)
    write(store, opened, data[: len(data) // 2])
    write_back(opened.fd, 0, len(data) // 2)
    return opened


@pytest.mark.parametrize("cut", Cut, ids=lambda cut: cut.name)
def test_bytes_of_a_rewrite_never_come_before_the_end_of_the_old_identity(
    powered: Drive, cut: Cut
) -> None:
    """Half old and half new: what called it whole is gone before the first new byte."""
    store = powered.store
    put(store, ROOT_INODE, b"K", b"1" * LARGE_BYTES)
    store.sync()
    overwrite(store, b"K", b"2" * LARGE_BYTES)
    powered.cut(cut)
    store = powered.start()
    with pytest.raises(NotFound):
        store.lookup(ROOT_INODE, b"K")


def append(store: Driven, ino: InodeNo) -> None:
    """Open for appending and close without a byte: the identity goes, and a tick brings it back."""
    store.close(store.open(ino, writer=True, truncate=False, appends=True), writer=True)


def cut_short(store: Driven, ino: InodeNo) -> None:
    store.truncate(ino, LARGE_BYTES // 2)


def make_longer(store: Driven, ino: InodeNo) -> None:
    """It is a slab from now on; its identity goes, and the tick takes it away."""
    store.truncate(ino, LARGE_BYTES + 4096)
    settle(store)


def make_longer_just_now(store: Driven, ino: InodeNo) -> None:
    store.truncate(ino, LARGE_BYTES + 4096)


@pytest.mark.parametrize("before", [append, cut_short, make_longer, make_longer_just_now])
def test_an_identity_that_went_before_the_rewrite_is_waited_for_too(
    powered: Drive, before: Callable[[Driven, InodeNo], None]
) -> None:
    """Whoever took it away: the device has it still, and a block of its size under it."""
    store = powered.store
    ino = put(store, ROOT_INODE, b"K", b"1" * LARGE_BYTES)
    store.sync()
    before(store, ino)
    overwrite(store, b"K", b"2" * LARGE_BYTES)
    powered.cut(Cut.NOTHING)
    assert tree(powered.start()) == {}


def test_a_removed_block_that_is_opened_again_is_not_called_whole(powered: Drive) -> None:
    """By way of /proc/self/fd: a power loss may bring its name back, but then with its bytes."""
    store = powered.store
    ino = put(store, ROOT_INODE, b"K", b"1" * LARGE_BYTES)
    store.sync()
    store.open(ino, writer=False, truncate=False)
    store.unlink(ROOT_INODE, b"K")
    overwrite_inode(store, ino, b"2" * LARGE_BYTES)
    powered.cut(Cut.NOTHING)
    assert tree(powered.start()) == {}


@pytest.mark.parametrize("cut", Cut, ids=lambda cut: cut.name)
def test_a_renamed_slab_is_identified_behind_its_bytes(powered: Drive, cut: Cut) -> None:
    """Overwritten bytes leave no trace: the log with the identity must not overtake them."""
    store = powered.store
    put(store, ROOT_INODE, b"slab", b"1" * LARGE_BYTES)
    store.sync()
    opened = overwrite(store, b"slab", b"2" * LARGE_BYTES)
    write(store, opened, b"2" * LARGE_BYTES)
    store.close(opened, writer=True)
    store.rename(ROOT_INODE, b"slab", ROOT_INODE, b"K")
    settle(store)
    powered.cut(cut)
    found = tree(powered.start())
    assert found in ({}, {b"/K": b"2" * LARGE_BYTES})
    assert cut is Cut.NOTHING or found


def test_a_killed_server_loses_nothing_it_published(powered: Drive) -> None:
    store = powered.store
    stored = store_some(store, b"")
    ino = store.lookup(ROOT_INODE, b"2")
    store.set_xattr(ino, b"user.k", b"v")
    powered.kill()
    store = powered.start()
    assert tree(store) == {b"/" + name: data for name, data in stored.items()}
    assert store.xattr(ino, b"user.k") == b"v"


def test_a_cut_within_one_boot_is_not_taken_for_a_kill(powered: Drive) -> None:
    """The boot id vouches for nothing then; nor after a look at the pool, which cleans the log."""
    store = powered.store
    put(store, ROOT_INODE, b"synced", b"s")
    store.sync()
    put(store, ROOT_INODE, b"late", b"l")
    powered.cut(Cut.NOTHING)
    assert powered.problems() == ["index: the pool was cut off before it could stop"]
    store = powered.start()
    assert tree(store) == {b"/synced": b"s"}


def test_a_start_that_is_killed_while_xfs_recovers_leaves_its_reason_behind(
    powered: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is clean from there on, and RUN says nothing yet."""
    store = powered.store
    put(store, ROOT_INODE, b"synced", b"s")
    store.sync()
    put(store, ROOT_INODE, b"late", b"l")
    powered.cut(Cut.NOTHING)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr("kvfs.devices.xfs.distrust_index", die)
        with pytest.raises(KeyboardInterrupt):
            powered.start()
    wait_released(str(powered.path))
    with open_source(str(powered.path), read_only=True) as device:
        assert not read_run_state(device.pool_fd, Syscalls()).trusted
    assert tree(powered.start()) == {b"/synced": b"s"}
    assert not is_cut_off_noted(powered.store.device.epoch)


def test_a_clean_pool_is_mounted_read_only_and_checked_so(powered: Drive) -> None:
    put(powered.store, ROOT_INODE, b"a", b"x")
    powered.stop()
    powered.settings = powered.read_only()
    assert tree(powered.start()) == {b"/a": b"x"}


def test_a_pool_that_was_cut_off_is_not_mounted_read_only(powered: Drive) -> None:
    powered.cut(Cut.NOTHING)
    powered.settings = powered.read_only()
    with pytest.raises(IndexDamaged, match="not stopped cleanly"):
        powered.start()


class PowerFails(BaseException):
    """The machine stops in the middle of a call's work."""


def cut_behind(store: Driven, calls: int, failing: pytest.MonkeyPatch) -> None:
    """Let the power go after *calls* more changes of extended attributes; they have happened."""
    left = iter(range(calls))

    def counted(call: Callable[..., None]) -> Callable[..., None]:
        def made(*arguments: object) -> None:
            if next(left, None) is None:
                raise PowerFails
            call(*arguments)

        return made

    syscalls = store.syscalls
    for name in ("setxattr", "removexattr"):
        failing.setattr(syscalls, name, counted(getattr(syscalls, name)))


@pytest.mark.parametrize("calls", [1, 2, 3, 4])
def test_a_cut_inside_a_rename_loses_no_directory(
    powered: Drive, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """It was lost with all its blocks: its two attributes were changed one by one."""
    store = powered.store
    directory, _ = store.make_node(ROOT_INODE, b"one", DIRECTORY, 0, 0)
    put(store, directory, b"in", b"inside")
    store.make_node(ROOT_INODE, b"link", stat.S_IFLNK | 0o777, 0, 0, b"link")
    store.sync()
    for name, new_name in ((b"one", b"two"), (b"link", b"other")):
        store.rename(ROOT_INODE, name, ROOT_INODE, new_name)
        with monkeypatch.context() as failing, contextlib.suppress(PowerFails):
            cut_behind(store, calls, failing)
            store.hurry()
    powered.cut(Cut.LOG_ONLY)
    store = powered.start()
    found = [name for _, name in store.children(ROOT_INODE, InodeNo(0))]
    assert len(found) == 2
    kept = b"one" if b"one" in found else b"two"
    assert get(store, store.lookup(ROOT_INODE, kept), b"in") == b"inside"
    link = b"link" if b"link" in found else b"other"
    assert store.record(store.lookup(ROOT_INODE, link)).target == b"link"


@pytest.mark.parametrize("closes", [False, True], ids=["begun", "closed"])
@pytest.mark.parametrize("cut", Cut, ids=lambda cut: cut.name)
def test_a_block_that_a_server_empties_is_the_old_one_the_new_one_or_none(
    powered: Drive, cut: Cut, *, closes: bool
) -> None:
    """[life-server-empties] No fsync parts the two: new bytes lie in other blocks of the device."""
    store = powered.store
    old, new = b"1" * LARGE_BYTES, b"2" * LARGE_BYTES
    ino = put(store, ROOT_INODE, b"K", old)
    store.sync()
    store.truncate(ino, 0, SERVER)
    opened = store.open_served(ino, writer=True)
    assert not store.must_forget(opened)
    write(store, opened, new if closes else new[: LARGE_BYTES // 2])
    write_back(opened.fd, 0, LARGE_BYTES // 2)
    if closes:
        store.close_served(opened, writer=True)
        settle(store)
    powered.cut(cut)
    found = tree(powered.start())
    assert found in ({}, {b"/K": old}, {b"/K": new})
    assert closes or found != {b"/K": new}
