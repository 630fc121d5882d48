"""The heat of a running store: what touches it, and how it follows the index."""

import dataclasses
import stat
from typing import Final

import numpy as np
import pytest

from kvfs.core.directory_policy import EVICT, PIN
from kvfs.core.errors import Damaged
from kvfs.core.eviction_policy import BURST_BITS, Rank
from kvfs.core.pool_layout import HEAT
from kvfs.core.types import ROOT_INODE, InodeNo
from tests.support.store.driven import Driven
from tests.support.store.stores import DIRECTORY, FILE, Host, put, settle

BLOCK: Final = b"k" * 70_000
SMALL: Final = b"{}"


def stored(store: Driven, parent: InodeNo, name: bytes, data: bytes = BLOCK) -> InodeNo:
    """Store a block as connectors do: under a temporary name, then renamed."""
    ino = put(store, parent, name + b".tmp", data)
    store.rename(parent, name + b".tmp", parent, name, replace=True)
    return ino


def rank(store: Driven, ino: InodeNo) -> Rank:
    """Return the rank of *ino* in the heat."""
    return store.heat()[ino].rank


def stamp(store: Driven, ino: InodeNo) -> int:
    """Return when *ino* was touched last."""
    return store.heat()[ino].touched


def known(store: Driven) -> set[int]:
    """Return the inodes in the heat."""
    return set(store.heat())


def directory(store: Driven, name: bytes, parent: InodeNo = ROOT_INODE) -> InodeNo:
    """Make a directory."""
    ino, _ = store.make_node(parent, name, DIRECTORY, 0, 0)
    return ino


def test_published_blocks_have_their_rank(running: Host) -> None:
    store = running.store
    block = stored(store, ROOT_INODE, b"block")
    small = stored(store, ROOT_INODE, b"config.json", SMALL)
    directory(store, b"dir")
    assert known(store) == {block, small}
    assert rank(store, block) is Rank.PUBLISHED
    assert rank(store, small) is Rank.SMALL
    held_bytes = running.allocated_bytes(block)
    assert store.held_bytes(Rank.PUBLISHED) == held_bytes
    store.unlink(ROOT_INODE, b"block")
    assert known(store) == {small}


def test_a_block_that_is_being_rewritten_does_not_go(running: Host) -> None:
    store = running.store
    ino = stored(store, ROOT_INODE, b"block")
    opened = store.open(ino, writer=True, truncate=False)
    assert rank(store, ino) is Rank.NEVER
    store.close(opened, writer=True)
    assert rank(store, ino) is Rank.PUBLISHED


def test_a_replaced_block_is_forgotten(running: Host) -> None:
    store = running.store
    old = stored(store, ROOT_INODE, b"block")
    new = stored(store, ROOT_INODE, b"block")
    assert known(store) == {new}
    assert not store.ranked(old)


def test_opening_is_a_touch(running: Host) -> None:
    store = running.store
    ino = stored(store, ROOT_INODE, b"block")
    before = stamp(store, ino)
    opened = store.open(ino, writer=False, truncate=False)
    assert stamp(store, ino) > before
    store.close(opened, writer=False)


@pytest.mark.parametrize(
    ("change", "is_touch"),
    [
        ({"atime_ns": 5}, True),  # llm-d: utimensat(UTIME_NOW, UTIME_OMIT)
        ({"atime_ns": 5, "mtime_ns": 5}, True),  # UCM: utime(path, NULL)
        ({"mode": 0o600}, False),
    ],
)
def test_setting_the_access_time_is_a_touch(
    running: Host, change: dict[str, int], is_touch: bool
) -> None:
    store = running.store
    ino = stored(store, ROOT_INODE, b"block")
    before = stamp(store, ino)
    store.change(ino, **change)
    assert (stamp(store, ino) > before) == is_touch


def test_a_touch_writes_no_index(running: Host) -> None:
    store = running.store
    ino = stored(store, ROOT_INODE, b"block")
    before = store.row(ino)
    last = store.transactions
    opened = store.open(ino, writer=False, truncate=False)
    store.close(opened, writer=False)
    store.touch(ino)
    assert store.row(ino) == before
    assert store.transactions == last


# ---- policies of directories ----


def test_a_policy_counts_for_what_is_below_already(running: Host) -> None:
    store = running.store
    above = directory(store, b"above")
    below = directory(store, b"below", above)
    ino = stored(store, below, b"block")
    for value, wanted in (
        (b"never", Rank.KEPT),
        (b"first", Rank.FIRST),
        (b"auto", Rank.PUBLISHED),
    ):
        store.set_xattr(above, EVICT, value)
        assert not store.scanned
        settle(store)
        assert store.scanned
        assert rank(store, ino) is wanted
        assert rank(store, stored(store, below, b"later")) is wanted


def test_a_policy_that_changes_during_the_walk_counts_too(running: Host) -> None:
    store = running.store
    above = directory(store, b"above")
    inos = [stored(store, above, b"%d" % number) for number in range(100)]
    settle(store)
    store.set_xattr(above, EVICT, b"first")
    assert store.run_one()  # some of them are ranked anew
    store.set_xattr(above, EVICT, b"never")
    settle(store)
    assert {rank(store, ino) for ino in inos} == {Rank.KEPT}


def test_a_directory_that_moves_below_a_policy_follows_it(running: Host) -> None:
    store = running.store
    above, moved = directory(store, b"above"), directory(store, b"moved")
    store.set_xattr(above, EVICT, b"never")
    ino = stored(store, moved, b"block")
    settle(store)
    store.rename(ROOT_INODE, b"moved", ROOT_INODE, b"renamed", replace=True)
    assert store.scanned  # nothing changes for what lies below
    store.rename(ROOT_INODE, b"renamed", above, b"moved", replace=True)
    settle(store)
    assert rank(store, ino) is Rank.KEPT
    store.rename(above, b"moved", ROOT_INODE, b"moved", replace=True)
    settle(store)
    assert rank(store, ino) is Rank.PUBLISHED


def test_a_pin_is_part_of_the_rank(running: Host) -> None:
    store = running.store
    above, other = directory(store, b"above"), directory(store, b"other")
    first, second = stored(store, above, b"first"), stored(store, above, b"second")
    outside = stored(store, other, b"outside")
    store.set_xattr(above, PIN, b"1")
    store.set_xattr(second, PIN, b"0")
    store.set_xattr(outside, PIN, b"1")
    settle(store)
    assert [rank(store, ino) for ino in (first, second, outside)] == [
        Rank.KEPT,
        Rank.PUBLISHED,
        Rank.KEPT,
    ]
    assert rank(store, stored(store, above, b"later")) is Rank.KEPT
    store.rename(above, b"first", other, b"first", replace=True)  # it left what was pinned
    store.rename(other, b"outside", ROOT_INODE, b"outside", replace=True)  # its pin is its own
    assert [rank(store, ino) for ino in (first, outside)] == [Rank.PUBLISHED, Rank.KEPT]
    store.rename(ROOT_INODE, b"other", above, b"other", replace=True)
    settle(store)
    assert rank(store, first) is Rank.KEPT
    for ino in (above, outside):
        store.remove_xattr(ino, PIN)
    settle(store)
    assert {rank(store, ino) for ino in (first, second, outside)} == {Rank.PUBLISHED}


@pytest.mark.parametrize("heat", ["heat", "no heat"])
def test_a_pin_is_part_of_the_rank_after_a_start_too(running: Host, heat: str) -> None:
    store = running.store
    inos = [stored(store, ROOT_INODE, b"%d" % number) for number in range(3)]
    store.set_xattr(inos[1], PIN, b"1")
    settle(store)
    stamps = [stamp(store, ino) for ino in inos]
    running.stop()
    if heat == "no heat":
        (running.path / HEAT).unlink()
    store = running.start()
    settle(store)
    assert [rank(store, ino) for ino in inos] == [Rank.PUBLISHED, Rank.KEPT, Rank.PUBLISHED]
    if heat == "heat":
        assert [stamp(store, ino) for ino in inos] == stamps  # learning of it is no touch


def test_a_walk_that_the_device_refuses_goes_on_with_the_next_tick(
    running: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that had ended for good would leave what it did not reach out of every plan."""
    store = running.store
    with monkeypatch.context() as broken:
        ino = begin_walk_in_vain(store, broken, OSError("the device is gone"))
        for _ in range(3):
            settle(store)
    assert caplog.text.count("index scan postponed") == 1
    assert not store.scanned
    settle(store)
    assert store.scanned
    assert rank(store, ino) is Rank.KEPT


def test_a_walk_that_ends_in_damage_begins_anew_with_the_next_one(
    running: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = running.store
    with monkeypatch.context() as broken:
        ino = begin_walk_in_vain(store, broken, Damaged("index: broken tree"))
        store.run_all()
    assert "background job failed" in caplog.text
    settle(store)
    assert store.scanned
    store.rank_anew()
    settle(store)
    assert rank(store, ino) is Rank.KEPT


def begin_walk_in_vain(store: Driven, broken: pytest.MonkeyPatch, failure: Exception) -> InodeNo:
    """Let a block no longer go, which a walk through an index that fails is to find; return it."""

    def fail(*_: object, **__: object) -> None:
        raise failure

    above = directory(store, b"above")
    ino = stored(store, above, b"block")
    settle(store)
    store.fail_walk(broken, fail)
    store.set_xattr(above, EVICT, b"never")
    return ino


# ---- starts ----


def test_a_restart_keeps_the_order_of_touches(running: Host) -> None:
    store = running.store
    inos = [stored(store, ROOT_INODE, b"%d" % number) for number in range(5)]
    for ino in (inos[1], inos[0]):
        store.touch(ino)
    stamps = [stamp(store, ino) for ino in inos]
    running.stop()
    store = running.start()
    assert [stamp(store, ino) for ino in inos] == stamps
    settle(store)
    assert [stamp(store, ino) for ino in inos] == stamps
    assert known(store) == set(inos)


@pytest.mark.parametrize("end", ["kill", "lose_power"])
def test_blocks_stored_since_the_last_save_are_found(
    running: Host, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = running.store
    kept, removed = (stored(store, ROOT_INODE, name) for name in (b"kept", b"removed"))
    store.save_heat()
    store.unlink(ROOT_INODE, b"removed")
    later = stored(store, ROOT_INODE, b"later")
    store.erase_removed()
    store.sync()  # the identities are on the device
    getattr(running, end)()
    store = running.start()
    assert known(store) == {kept, removed}
    settle(store)
    assert known(store) == {kept, later}
    assert rank(store, later) is Rank.PUBLISHED
    assert ("rebuilt" in caplog.text) == (end == "lose_power")


def test_without_its_file_the_oldest_change_counts_as_the_oldest_touch(running: Host) -> None:
    seconds = iter(range(1_790_000_000, 1_800_000_000, 10))
    store = running.store
    store.turn_calendar(lambda: next(seconds) * 10**9)
    inos = [stored(store, ROOT_INODE, b"%d" % number) for number in range(5)]
    store.change(inos[0], atime_ns=5, mtime_ns=5)
    running.stop()
    (running.path / HEAT).unlink()
    store = running.start()
    settle(store)
    bursts = [stamp(store, ino) >> BURST_BITS for ino in inos]
    assert np.argsort(bursts).tolist() == [1, 2, 3, 4, 0]
    assert all(row.touches == 1 for row in store.heat().values())


def test_a_policy_in_the_settings_counts_from_the_next_start(running: Host) -> None:
    store = running.store
    ino = stored(store, directory(store, b"models"), b"block")
    assert rank(store, ino) is Rank.PUBLISHED
    running.stop()
    policies = {"/models": {"evict": "never"}}
    store = running.start(settings=dataclasses.replace(running.settings, policies=policies))
    settle(store)
    assert rank(store, ino) is Rank.KEPT


def test_drafts_and_special_files_are_not_in_the_heat(running: Host) -> None:
    store = running.store
    store.make_node(ROOT_INODE, b"fifo", stat.S_IFIFO | 0o644, 0, 0)
    opened, _ = store.create(ROOT_INODE, b"draft", FILE, 0, 0)
    store.rank_anew()
    settle(store)
    assert known(store) == set()
    store.close(opened, writer=True)
    assert known(store) == {opened.ino}


def test_a_read_only_start_has_no_heat(running: Host) -> None:
    stored(running.store, ROOT_INODE, b"block")
    running.stop()
    store = running.start(settings=running.read_only())
    settle(store)
    assert known(store) == set()
