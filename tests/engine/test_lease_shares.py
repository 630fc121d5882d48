"""Who is refused when leases reach their bound, and who still gets one: told from numbers."""

import os
from collections.abc import Callable

import pytest

from kvfs.core.lifecycle import State
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.machine.processes import NOBODY, Maker
from kvfs.pool.rules.leases import LeaseShares, Lessee
from tests.support.store.stores import FILE, MIB, Host, host, put, write

ONE, OTHER, THIRD = (Maker(100 + number, number) for number in range(1, 4))
USER, NEIGHBOUR = 1000, 1001
CAPACITY, BOUND = 1000, 800


def shares(*held: tuple[int, Maker, int], bound: Callable[[], int] = lambda: BOUND) -> LeaseShares:
    made = LeaseShares(bound, lambda: CAPACITY)
    for uid, maker, size_bytes in held:
        made.count(uid, maker, size_bytes)
    return made


def test_up_to_the_bound_nobody_is_refused() -> None:
    leases = shares((USER, ONE, BOUND))
    assert not leases.refuses(USER, ONE)
    assert leases.gives(USER, 0)


def test_beyond_it_who_holds_more_than_its_share_is_refused() -> None:
    leases = shares((USER, ONE, BOUND), (USER, OTHER, 50))
    assert leases.refuses(USER, ONE)
    assert not leases.refuses(USER, OTHER)
    assert not leases.refuses(USER, THIRD)
    assert not leases.refuses(NEIGHBOUR, THIRD)


def test_a_user_below_its_share_is_not_refused_however_many_processes_another_has() -> None:
    forked = [(USER, Maker(number, number), 7) for number in range(200, 320)]
    leases = shares((NEIGHBOUR, ONE, 300), *forked)
    assert leases.held_bytes > BOUND
    assert not leases.refuses(NEIGHBOUR, ONE)
    assert all(leases.refuses(uid, maker) for uid, maker, _ in forked)


def test_what_the_bound_leaves_is_for_what_is_under_way_and_for_others() -> None:
    leases = shares((USER, ONE, BOUND))
    assert leases.gives(USER, 50)
    assert not leases.gives(USER, 51)
    assert leases.gives(NEIGHBOUR, 100)
    assert not leases.gives(NEIGHBOUR, 101)


def test_a_lease_that_ends_counts_no_more() -> None:
    leases = shares((USER, ONE, BOUND + 1), (USER, ONE, -2))
    assert not leases.refuses(USER, ONE)
    leases.count(USER, ONE, 1 - BOUND)
    assert leases.most() is None
    assert leases.held_bytes == 0


def test_no_room_for_leases_at_all_refuses_only_who_has_one() -> None:
    leases = shares(bound=lambda: 0)
    assert leases.bound_bytes == 0
    assert not leases.refuses(USER, ONE)
    leases.count(USER, ONE, 1)
    assert leases.refuses(USER, ONE)
    assert not leases.refuses(USER, OTHER)


def test_the_process_that_holds_most_is_named_with_all_its_users() -> None:
    leases = shares((USER, ONE, 30), (NEIGHBOUR, OTHER, 20), (USER, OTHER, 20), (0, NOBODY, 39))
    assert leases.most() == Lessee(OTHER, 40)


def test_a_store_that_starts_again_knows_who_holds_what() -> None:
    with host() as machine:
        store = machine.start()
        maker = store.maker_of(os.getpid())
        _store(machine, b"kept", maker)
        machine.stop()
        store = machine.start()
        store.run_all()
        assert store.lessee() == Lessee(maker, MIB)


@pytest.mark.parametrize("reopens", [False, True])
def test_what_finds_no_room_for_its_lease_is_nobodys(reopens: bool) -> None:
    """A block rewritten in place, too: it would stay until its maker ends."""
    with host() as machine:
        store = machine.start()
        store.bound_leases(MIB)
        maker = store.maker_of(os.getpid())
        _store(machine, b"first", maker)
        other = put(store, ROOT_INODE, b"renamed.tmp", bytes(MIB))
        store.rename(ROOT_INODE, b"renamed.tmp", ROOT_INODE, b"renamed")
        if reopens:
            opened = store.open(other, writer=True, truncate=False, maker=maker)
            write(store, opened, b"x")
            store.close(opened, writer=True)
            assert store.record(other).state == State.ORPHAN_SLAB
        else:
            ino = _store(machine, b"second", maker)
            assert store.record(ino).state == State.PUBLISHED
        assert store.lease_shares_bytes == MIB


def _store(machine: Host, name: bytes, maker: Maker) -> InodeNo:
    store = machine.store
    opened, _ = store.create(ROOT_INODE, name, FILE, 0, 0, maker)
    write(store, opened, bytes(MIB))
    store.close(opened, writer=True)
    return opened.ino
