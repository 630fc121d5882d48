"""Leases and slabs in a store: a start finds them again, and what they hold stays held."""

import contextlib
import errno

import pytest

from kvfs.core.errors import KvfsError, NoSpace
from kvfs.core.lifecycle import State
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.machine.processes import Maker
from tests.support.devices.failing_syscalls import FailingSyscalls
from tests.support.store.life_model import NO_PID, Lives
from tests.support.store.stores import FILE, MIB, Host, assert_exact, host, put, settle, write

ONE = Maker(NO_PID, 1)
OTHER = Maker(NO_PID + 1, 2)


def watch(running: Host) -> Lives:
    return running.store.watch_processes(Lives())


def state_of(running: Host, name: bytes) -> State:
    ino = running.store.lookup(ROOT_INODE, name)
    return State(running.store.record(ino).state)


def make(running: Host, name: bytes, maker: Maker, *, slab: bool = False) -> InodeNo:
    store = running.store
    opened, _ = store.create(ROOT_INODE, name, FILE, 0, 0, maker)
    if slab:
        store.truncate(opened.ino, 9000)
    write(store, opened, b"x" * 5000)
    store.close(opened, writer=True)
    return opened.ino


@pytest.mark.parametrize("end", ["stop", "kill"])
@pytest.mark.parametrize("lived", [True, False])
@pytest.mark.usefixtures("caplog")
def test_a_start_finds_every_holding_again(running: Host, end: str, lived: bool) -> None:
    watch(running).begin(ONE)
    make(running, b"block", ONE)
    make(running, b"slab", ONE, slab=True)
    make(running, b"K.tmp", ONE)
    if end == "kill":
        running.kill()
    else:
        running.stop()
    running.start()
    lives = watch(running)
    if lived:
        lives.begin(ONE)
    settle(running.store)
    running.store.tick()
    assert running.store.scanned
    expected = [State.LEASED, State.SLAB, State.LEASED]
    if not lived:
        expected = [State.PUBLISHED, State.ORPHAN_SLAB, State.ORPHAN]
    assert [state_of(running, name) for name in (b"block", b"slab", b"K.tmp")] == expected


@pytest.mark.usefixtures("caplog")
def test_a_start_whose_walk_is_refused_finds_the_holdings_later(
    running: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the leases of whoever died meanwhile would never end."""
    watch(running).begin(ONE)
    make(running, b"block", ONE)
    running.stop()
    running.start()
    watch(running)

    def refuse(*_: object, **__: object) -> None:
        raise NoSpace("index: no room for what waits")

    with monkeypatch.context() as full:
        running.store.fail_walk(full, refuse)
        settle(running.store)
        assert not running.store.scanned
    settle(running.store)
    running.store.tick()
    assert running.store.scanned
    assert state_of(running, b"block") is State.PUBLISHED


@pytest.mark.usefixtures("caplog")
def test_no_process_of_another_boot_lives(running: Host) -> None:
    """Its number and even its birth may belong to somebody else now."""
    watch(running).begin(ONE)
    make(running, b"block", ONE)
    running.stop()
    running.pretend_reboot()
    running.start()
    watch(running).begin(ONE)
    settle(running.store)
    running.store.tick()
    assert state_of(running, b"block") is State.PUBLISHED


def test_a_slab_in_use_keeps_its_lease_until_it_is_closed(running: Host) -> None:
    lives = watch(running)
    lives.begin(ONE)
    ino = make(running, b"slab", ONE, slab=True)
    opened = running.store.open(ino, writer=True, truncate=False, maker=OTHER)
    lives.end(ONE)
    running.store.tick()
    running.store.tick()
    assert state_of(running, b"slab") is State.SLAB
    running.store.close(opened, writer=True)
    running.store.tick()
    assert state_of(running, b"slab") is State.ORPHAN_SLAB


@pytest.mark.parametrize("writes", [True, False])
def test_who_rewrites_a_block_takes_it_over_and_who_only_opens_it_does_not(
    running: Host, writes: bool
) -> None:
    lives = watch(running)
    lives.begin(ONE)
    lives.begin(OTHER)
    ino = make(running, b"block", ONE)
    opened = running.store.open(ino, writer=True, truncate=False, maker=OTHER)
    if writes:
        write(running.store, opened, b"y")
    running.store.close(opened, writer=True)
    record = running.store.record(ino)
    assert (record.maker_tgid, record.maker_birth) == (OTHER if writes else ONE)
    assert record.state == (State.REWRITTEN if writes else State.LEASED)
    lives.end(OTHER)
    running.store.tick()
    assert state_of(running, b"block") is (State.ORPHAN_SLAB if writes else State.LEASED)


def test_a_removed_block_is_held_no_more(running: Host) -> None:
    ino = put(running.store, ROOT_INODE, b"a", b"x")
    assert running.store.lease_state(ino) is State.LEASED
    running.store.unlink(ROOT_INODE, b"a")
    assert running.store.lease_state(ino) is None


@pytest.mark.usefixtures("caplog")
@pytest.mark.parametrize("error_no", [errno.EFBIG, errno.EIO])
def test_a_block_that_could_not_be_made_longer_may_go_some_time_later(error_no: int) -> None:
    """Any call of a truncate by path fails: the block is what it was, or a slab of nobody."""
    fail_at, seen = 0, set()
    while True:
        fail_at += 1
        calls = FailingSyscalls(["open", "ftruncate", "fstat", "utime", "commit"], 0, error_no)
        with host() as made:
            store = made.start(calls)
            ino = put(store, ROOT_INODE, b"block.tmp", bytes(MIB))
            store.rename(ROOT_INODE, b"block.tmp", ROOT_INODE, b"block", replace=True)
            settle(store)
            calls.calls, calls.fail_at = 0, fail_at
            with contextlib.suppress(OSError, KvfsError):
                store.truncate(ino, 8 * MIB)
            calls.fail_at = 0
            settle(store)
            seen.add(state_of(made, b"block"))
            store.end_leases(1e9)
            assert store.obstacle(ino) is None
            assert store.evictable_bytes >= MIB
            assert_exact(made)
        if not calls.failed:
            break
    assert fail_at > 5
    assert seen == {State.PUBLISHED, State.SLAB}
