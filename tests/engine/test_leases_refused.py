"""A store whose leases reach their bound: who holds what, and what finds no room for its lease."""

import os

import pytest

from kvfs.core.lifecycle import State
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.machine.processes import Maker
from tests.support.store.stores import FILE, MIB, Host, host, put, write


def test_a_store_that_starts_again_knows_who_holds_what() -> None:
    with host() as machine:
        store = machine.start()
        maker = store.maker_of(os.getpid())
        _store(machine, b"kept", maker)
        machine.stop()
        store = machine.start()
        store.run_all()
        assert store.lessee() == (maker, MIB)


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
