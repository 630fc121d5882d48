"""Directories with ``publish=rename``: what was not renamed is its maker's, and ends with it."""

import dataclasses
import os
from collections.abc import Iterator
from typing import Final

import pytest

from kvfs.core.directory_policy import LEASE, PUBLISH, policies_of
from kvfs.core.errors import NoSpace, NotFound
from kvfs.core.lifecycle import State
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.machine.processes import NOBODY, SERVER, Maker
from tests.support.store.stores import (
    FILE,
    MIB,
    Host,
    allocate,
    assert_exact,
    get,
    host,
    make_directory,
    settle,
    write,
)

DATA: Final = b"d" * 9000
OTHER: Final = Maker(1, 1)


@pytest.fixture
def running() -> Iterator[Host]:
    with host() as made:
        made.start()
        yield made


@pytest.fixture
def top(running: Host) -> InodeNo:
    """A directory in which only a rename publishes."""
    made = make_directory(running, b"top")
    running.store.set_xattr(made, PUBLISH, b"rename")
    return made


@pytest.fixture
def own(running: Host) -> Maker:
    """This process."""
    return running.store.maker_of(os.getpid())


def store_in(
    running: Host, parent: InodeNo, name: bytes, maker: Maker, data: bytes = DATA
) -> InodeNo:
    """Create and close a file; nobody renames it."""
    opened, _ = running.store.create(parent, name, FILE, 0, 0, maker)
    write(running.store, opened, data)
    running.store.close(opened, writer=True)
    return opened.ino


def state(running: Host, parent: InodeNo, name: bytes) -> State | None:
    """Return the state of what has *name*, None for a miss."""
    try:
        return State(running.store.record(running.store.lookup(parent, name)).state)
    except NotFound:
        return None


def seen_by(running: Host, ino: InodeNo, *who: Maker) -> list[bool]:
    """Tell for each process whether it finds *ino* by its name."""
    record = running.store.record(ino)
    return [running.store.seen(ino, record, one) == ino for one in who]


@pytest.mark.parametrize("name", [b"K", b"K.tmp"])
def test_what_is_closed_is_its_makers_until_it_is_renamed(
    running: Host, top: InodeNo, own: Maker, name: bytes
) -> None:
    """[life-publish-rename]"""
    store = running.store
    opened, record = store.create(top, name, FILE, 0, 0, own)
    assert not store.trusts_name(record, just_created=True)
    assert seen_by(running, opened.ino, own, OTHER, SERVER) == [True, False, False]
    write(store, opened, DATA)
    store.close(opened, writer=True)
    assert state(running, top, name) is State.UNRENAMED
    assert store.xattr(opened.ino, b"user.kvfs.state") == b"draft"
    assert seen_by(running, opened.ino, own, OTHER, SERVER) == [True, False, False]
    assert not store.trusts_name(store.record(opened.ino), just_created=False)
    store.rename(top, name, top, b"L", who=own)
    assert state(running, top, b"L") is State.PUBLISHED
    assert seen_by(running, opened.ino, own, OTHER, SERVER) == [True] * 3
    assert get(store, top, b"L") == DATA
    assert_exact(running)


def test_it_goes_when_its_maker_ends(running: Host, top: InodeNo, own: Maker) -> None:
    """[life-publish-rename]"""
    store = running.store
    held = store_in(running, top, b"K", own)
    assert store.lease_state(held) is State.UNRENAMED
    assert store.lose_maker(held)
    assert state(running, top, b"K") is None
    assert store.describe()["unverified_blocks"] == 0
    settle(store)
    assert_exact(running)


@pytest.mark.parametrize("name", [b"K", b"K.tmp"])
def test_a_servers_goes_with_its_lease_by_time(running: Host, top: InodeNo, name: bytes) -> None:
    """[life-publish-rename] The server finds it: its client may rename it."""
    ino = store_in(running, top, name, SERVER)
    assert seen_by(running, ino, SERVER, NOBODY, OTHER) == [True, False, False]
    store = running.store
    store.end_leases(store.now_s() + 1)
    assert state(running, top, name) is State.UNRENAMED
    store.end_leases(1e9)
    assert state(running, top, name) is None


@pytest.mark.usefixtures("caplog")
def test_after_a_start_it_still_is(running: Host, top: InodeNo, own: Maker) -> None:
    """[life-publish-rename] After a clean stop and after a kill; in another boot it goes."""
    ino = store_in(running, top, b"K", own)
    running.stop()
    running.start()
    settle(running.store)
    assert state(running, top, b"K") is State.UNRENAMED
    assert seen_by(running, ino, own, OTHER) == [True, False]
    running.store.commit()
    running.kill()
    running.start()
    settle(running.store)
    assert state(running, top, b"K") is State.UNRENAMED
    assert running.store.lose_maker(ino)
    assert state(running, top, b"K") is None
    settle(running.store)
    assert_exact(running)


def test_in_another_boot_it_goes(running: Host, top: InodeNo, own: Maker) -> None:
    """[life-publish-rename] Its maker is dead."""
    store_in(running, top, b"K", own)
    running.stop()
    running.pretend_reboot()
    running.start()
    settle(running.store)
    settle(running.store)
    assert state(running, top, b"K") is None
    assert_exact(running)


@pytest.mark.usefixtures("caplog")
def test_a_rebuild_does_not_know_it(running: Host, top: InodeNo, own: Maker) -> None:
    """[life-publish-rename] It has no identity before its rename."""
    store_in(running, top, b"K", own)
    store_in(running, top, b"L.tmp", own)
    running.store.rename(top, b"L.tmp", top, b"L", who=own)
    running.store.sync()
    running.lose_power()
    running.start()
    settle(running.store)
    top = running.store.lookup(ROOT_INODE, b"top")
    assert state(running, top, b"K") is None
    assert get(running.store, top, b"L") == DATA


def test_a_slab_is_withheld_too(running: Host, top: InodeNo, own: Maker) -> None:
    store = running.store
    opened, _ = store.create(top, b"K", FILE, 0, 0, own)
    allocate(store, opened, 8192)
    write(store, opened, DATA)
    store.close(opened, writer=True)
    assert state(running, top, b"K") is State.UNRENAMED
    store.truncate(opened.ino, 20_000)
    assert state(running, top, b"K") is State.UNRENAMED
    assert seen_by(running, opened.ino, own, OTHER) == [True, False]
    store.rename(top, b"K", top, b"L", who=own)
    assert state(running, top, b"L") is State.PUBLISHED
    assert_exact(running)


def test_written_piece_by_piece_it_is_a_draft_each_time(
    running: Host, top: InodeNo, own: Maker
) -> None:
    """A writer that is killed leaves nothing; one that reads only changes nothing."""
    store, ino = running.store, store_in(running, top, b"K.tmp", own)
    opened = store.open(ino, writer=True, truncate=False, maker=own)
    assert state(running, top, b"K.tmp") is State.DRAFT
    assert seen_by(running, ino, own, OTHER) == [True, False]
    write(store, opened, b"x", len(DATA))
    store.close(opened, writer=True)
    assert state(running, top, b"K.tmp") is State.UNRENAMED
    assert seen_by(running, ino, own, OTHER) == [True, False]
    opened = store.open(ino, writer=True, truncate=False, maker=own)
    opened.tear()
    store.close(opened, writer=True)
    assert state(running, top, b"K.tmp") is None


def test_renamed_it_is_identified_behind_its_bytes(running: Host, top: InodeNo, own: Maker) -> None:
    """Overwritten or written once: a rebuild could not tell old bytes from new ones."""
    store = running.store
    written_once = store_in(running, top, b"L.tmp", own)
    ino = store_in(running, top, b"K.tmp", own)
    opened = store.open(ino, writer=True, truncate=False, maker=own)
    write(store, opened, DATA[::-1])
    store.close(opened, writer=True)
    for name in (b"K", b"L"):
        store.rename(top, name + b".tmp", top, name, who=own)
    store.hurry()
    assert store.identity(ino) is None
    assert store.identity(written_once) is None
    store.sync()
    assert store.identity(ino) is not None
    assert store.identity(written_once) is not None


def test_truncate_by_path_leaves_it_its_makers(running: Host, top: InodeNo, own: Maker) -> None:
    ino = store_in(running, top, b"K.tmp", own)
    running.store.truncate(ino, 4096)
    assert seen_by(running, ino, own, OTHER) == [True, False]
    assert state(running, top, b"K.tmp") is State.UNRENAMED


def test_a_rewrite_of_what_was_renamed_is_withheld(running: Host, top: InodeNo, own: Maker) -> None:
    """[life-publish-rename] With O_TRUNC; by a server, too, which empties it."""
    store = running.store
    for name in (b"K", b"L"):
        store_in(running, top, name + b".tmp", own)
        store.rename(top, name + b".tmp", top, name, who=own)
    old = store.lookup(top, b"K")
    fresh = store.supersede(old, 5)
    opened = store.open(fresh, writer=True, truncate=True, maker=own, thread=5)
    write(store, opened, DATA)
    store.close(opened, writer=True)
    assert seen_by(running, fresh, own, OTHER) == [True, False]
    ino = store.lookup(top, b"L")
    store.truncate(ino, 0, SERVER)
    opened = store.open_served(ino, writer=True)
    assert seen_by(running, ino, own, OTHER, SERVER) == [False, False, True]
    write(store, opened, DATA)
    store.close_served(opened, writer=True)
    assert seen_by(running, ino, own, OTHER, SERVER) == [False, False, True]
    assert state(running, top, b"L") is State.UNRENAMED


def test_a_name_that_another_writer_takes_is_kept_for_its_rename(
    running: Host, top: InodeNo, own: Maker
) -> None:
    """Two threads that store through one temporary name each rename their own."""
    store = running.store
    store_in(running, top, b"K.tmp", own)
    fresh = store.supersede(store.lookup(top, b"K.tmp"), 5)
    opened = store.open(fresh, writer=True, truncate=True, maker=own, thread=5)
    write(store, opened, DATA[::-1])
    store.rename(top, b"K.tmp", top, b"K", who=own)
    assert get(store, top, b"K") == DATA
    store.close(opened, writer=True)
    store.rename(top, b"K.tmp", top, b"K", who=own)
    assert get(store, top, b"K") == DATA[::-1]
    assert state(running, top, b"K") is State.PUBLISHED


def test_an_exchange_is_a_rename(running: Host, top: InodeNo, own: Maker) -> None:
    store_in(running, top, b"K", own)
    store_in(running, ROOT_INODE, b"L", own)
    running.store.exchange(top, b"K", ROOT_INODE, b"L")
    assert state(running, ROOT_INODE, b"L") is State.PUBLISHED
    assert_exact(running)


def test_it_is_inherited_and_a_deeper_directory_may_say_otherwise(
    running: Host, top: InodeNo, own: Maker
) -> None:
    """[life-publish-rename]"""
    store = running.store
    below = make_directory(running, b"below", top)
    assert store.xattr(below, PUBLISH) == b"rename"
    store_in(running, below, b"K", own)
    assert state(running, below, b"K") is State.UNRENAMED
    store.set_xattr(below, PUBLISH, b"close")
    store_in(running, below, b"L", own)
    assert state(running, below, b"L") is State.LEASED
    assert state(running, below, b"K") is State.UNRENAMED
    assert store.xattr(ROOT_INODE, PUBLISH) == b"close"


def test_the_settings_file_says_it_too(running: Host, own: Maker) -> None:
    """[life-publish-rename]"""
    top = make_directory(running, b"top")
    running.stop()
    policies = policies_of({"/top": {"publish": "rename"}})
    running.start(settings=dataclasses.replace(running.settings, policies=policies))
    ino = store_in(running, top, b"K", own)
    assert state(running, top, b"K") is State.UNRENAMED
    assert running.store.xattr(ino, PUBLISH) == b"rename"
    with pytest.raises(ValueError, match="close, rename"):
        policies_of({"/top": {"publish": "never"}})


def test_without_leases_it_is_kept_for_its_rename_all_the_same(
    running: Host, top: InodeNo, own: Maker
) -> None:
    """[life-publish-rename] Else a rename right behind the close would find nothing."""
    running.store.set_xattr(top, LEASE, b"none")
    ino = store_in(running, top, b"K", own)
    assert running.store.lease_state(ino) is State.UNRENAMED


def test_who_renames_nothing_is_refused_in_the_end(running: Host, top: InodeNo, own: Maker) -> None:
    """[life-publish-rename] Nothing of it may be evicted: it counts as leases do."""
    store = running.store
    store.bound_leases(MIB)
    for number in range(2):
        store_in(running, top, b"%d.tmp" % number, own, b"x" * MIB)
    with pytest.raises(NoSpace):
        store.create(top, b"2.tmp", FILE, 0, 0, own)
    store.rename(top, b"0.tmp", top, b"0", who=own)
    store.rename(top, b"1.tmp", top, b"1", who=own)
    store_in(running, top, b"2.tmp", own, DATA)
