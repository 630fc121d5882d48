"""Hints that clients told: taken for names, prefixes and sessions, of whom, and how they end."""

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest

from kvfs.core.directory_policy import EVICT, HINT
from kvfs.core.eviction_policy import Rank
from kvfs.core.hints import (
    BLOCKS_MAX,
    Do,
    HintBatch,
    HintClient,
    TakenHints,
    ToldHint,
    batch_of,
)
from kvfs.core.types import ROOT_INODE
from tests.support.clients.stepping import until
from tests.support.store.burst_blocks import CAPACITY_BYTES, FITS, flood, ranks, stored
from tests.support.store.driven import Driven
from tests.support.store.stores import Host, host, make_directory, settle

OWNER_UID: Final = 1000
GROUP_GID: Final = 77
OF_ROOT: Final = HintClient(0, frozenset({0}))
HOUR_DAYS: Final = 1 / 24


@pytest.fixture
def running() -> Iterator[Host]:
    with host(capacity_bytes=CAPACITY_BYTES) as made:
        made.start()
        yield made


def told(store: Driven, *hints: dict[str, Any], client: HintClient = OF_ROOT) -> dict[str, int]:
    """Tell *hints*; return what became of them, but for zeros."""
    done = TakenHints()
    for _ in store.take_hints(batch_of(json.dumps({"hints": hints}).encode()), client, done):
        pass
    return {key: count for key, count in vars(done).items() if count}


def test_what_is_told_of_names_holds_until_it_is_released(running: Host) -> None:
    store = running.store
    top = make_directory(running, b"top")
    kept, demoted, plain = (stored(store, name, top) for name in (b"a", b"b", b"c"))
    retain = {"do": "retain", "names": ["/top/a", "/top/none", "/top", ""], "priority": 80}
    assert told(store, retain, {"do": "demote", "names": ["top/b"]}) == {"taken": 2, "unknown": 3}
    assert ranks(store, kept, demoted, plain) == [Rank.RETAINED, Rank.FIRST, Rank.PUBLISHED]
    store.rename(top, b"a", ROOT_INODE, b"a")
    assert ranks(store, kept) == [Rank.RETAINED]
    assert told(store, {"do": "release", "names": ["/a", "/top/b"]}) == {"taken": 2}
    assert ranks(store, kept, demoted) == [Rank.PUBLISHED, Rank.PUBLISHED]
    shown = store.describe()["hints"]
    assert (shown["taken"], shown["unknown"]) == (4, 3)


def test_a_flood_passes_what_is_retained_until_its_time_is_over(running: Host) -> None:
    store = running.store
    kept, low = stored(store, b"kept"), stored(store, b"low")
    told(store, {"do": "retain", "names": ["kept"], "priority": 80, "duration_s": 3600})
    told(store, {"do": "retain", "names": ["low"], "priority": 5})
    flood(store, 3 * FITS)
    assert {kept, low} <= store.heat().keys()
    store.let_days_pass(2 * HOUR_DAYS)
    store.tick()
    flood(store, FITS)
    assert kept not in store.heat()
    assert low in store.heat()


def test_prefixes_and_sessions_name_all_below(running: Host) -> None:
    store = running.store
    for name in (b"aa", b"ab", b"b"):
        make_directory(running, name)
    aa, ab, b = (store.lookup(ROOT_INODE, name) for name in (b"aa", b"ab", b"b"))
    deep = make_directory(running, b"deep", ab)
    inos = [stored(store, b"1", aa), stored(store, b"2", deep), stored(store, b"3", b)]
    retain: dict[str, Any] = {"do": "retain", "prefixes": ["/a"]}
    assert told(store, retain) == {"taken": 2}
    assert ranks(store, *inos) == [Rank.RETAINED, Rank.RETAINED, Rank.PUBLISHED]
    assert told(store, {"do": "release", "prefixes": ["ab/"]}) == {"taken": 1}
    assert ranks(store, *inos) == [Rank.RETAINED, Rank.PUBLISHED, Rank.PUBLISHED]
    store.set_xattr(deep, HINT, b"session=s")
    store.set_xattr(inos[2], HINT, b"session=s")
    demote = {"do": "demote", "sessions": ["s", "t"], "prefixes": ["x[", "../a"]}
    assert told(store, demote) == {"taken": 2, "unknown": 3}
    assert ranks(store, *inos) == [Rank.RETAINED, Rank.FIRST, Rank.FIRST]


def test_who_may_not_write_may_not_hint(running: Host) -> None:
    store = running.store
    top = make_directory(running, b"top")
    inos = [stored(store, b"a", top, uid=OWNER_UID), stored(store, b"b", top, gid=GROUP_GID)]
    store.change(inos[1], mode=0o664)
    store.change(top, mode=0o755)
    hint = {"do": "retain", "names": ["top/a", "top/b"]}
    nobody = HintClient(5, frozenset({5}))
    owner, member = HintClient(OWNER_UID, frozenset()), HintClient(5, frozenset({5, GROUP_GID}))
    assert told(store, hint, client=nobody) == {"refused": 2}
    assert told(store, hint, client=owner) == {"taken": 1, "refused": 1}
    assert told(store, hint, client=member) == {"taken": 1, "refused": 1}
    assert ranks(store, *inos) == [Rank.RETAINED, Rank.RETAINED]
    store.change(top, mode=0o700)
    assert told(store, hint, client=owner) == {"refused": 2}


def test_what_is_told_comes_before_attributes_and_after_policies(running: Host) -> None:
    store = running.store
    top, never = make_directory(running, b"top"), make_directory(running, b"never")
    store.set_xattr(top, HINT, b"once")
    store.set_xattr(never, EVICT, b"never")
    settle(store)
    inos = [stored(store, b"a", top), stored(store, b"b", never)]
    told(store, {"do": "retain", "names": ["top/a"]}, {"do": "demote", "names": ["never/b"]})
    assert ranks(store, *inos) == [Rank.RETAINED, Rank.KEPT]
    told(store, {"do": "release", "names": ["top/a"]})
    assert ranks(store, inos[0]) == [Rank.FIRST]
    store.set_xattr(never, EVICT, b"auto")
    settle(store)
    assert ranks(store, inos[1]) == [Rank.FIRST]  # as it was told


def test_what_was_told_is_gone_with_the_block(running: Host) -> None:
    """Its row in the heat goes to another block."""
    store = running.store
    stored(store, b"a")
    told(store, {"do": "retain", "names": ["a"]})
    store.unlink(ROOT_INODE, b"a")
    assert ranks(store, stored(store, b"b"), stored(store, b"c")) == [Rank.PUBLISHED] * 2


def test_what_was_told_is_lost_with_the_server(running: Host) -> None:
    store = running.store
    ino = stored(store, b"a")
    told(store, {"do": "retain", "names": ["a"]})
    running.stop()
    store = running.start()
    settle(store)
    assert ranks(store, ino) == [Rank.PUBLISHED]


def test_a_line_hints_no_more_than_its_bound(running: Host) -> None:
    stored(running.store, b"a")
    done, hint = TakenHints(), ToldHint(Do.RETAIN, names=("a",) * (BLOCKS_MAX + 2))
    for _ in running.store.take_hints(HintBatch((hint, hint)), OF_ROOT, done):
        pass
    assert (done.taken, done.clipped) == (BLOCKS_MAX, 2)


def test_what_is_fetched_is_read(running: Host) -> None:
    store = running.store
    stored(store, b"a")
    stored(store, b"b")
    assert told(store, {"do": "fetch", "names": ["b", "a", "none"]}) == {"taken": 2, "unknown": 1}

    def is_counted() -> bool:
        store.tick()
        return bool(store.describe()["hints"]["fetched"] == 2)

    until(is_counted, "both are read")
