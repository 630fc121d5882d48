"""What no name leads to after an unclean start is kept for a day, unless its room is needed."""

import dataclasses
import os
from collections.abc import Iterator

import pytest

from kvfs.core.types import ROOT_INODE, SECOND_NS, InodeNo
from tests.support.store.driven import Driven
from tests.support.store.stores import DIRECTORY, FILE, MIB, Host, host, put, settle, tree

pytestmark = pytest.mark.usefixtures("caplog")

DAY_NS = 86_400 * SECOND_NS
CAPACITY_BYTES = 16 * MIB


@pytest.fixture
def running() -> Iterator[Host]:
    with host(capacity_bytes=CAPACITY_BYTES) as made:
        made.start()
        yield made


def strays(store: Driven) -> dict[str, int]:
    figures: dict[str, int] = store.describe()["strays"]
    return figures


def names_kept(running: Host) -> set[InodeNo]:
    directory = running.path / "strays"
    return (
        {InodeNo(int(name, 16)) for name in os.listdir(directory)} if directory.exists() else set()
    )


def lose_directory(running: Host, blocks: int, size_bytes: int = 5000) -> set[InodeNo]:
    """Lose the power and the identity of a directory with blocks; return those, and start."""
    store = running.store
    directory, _ = store.make_node(ROOT_INODE, b"dir", DIRECTORY, 0, 0)
    lost = {put(store, directory, b"%d" % number, b"b" * size_bytes) for number in range(blocks)}
    settle(store)
    store.create(ROOT_INODE, b"draft", FILE, 0, 0)
    os.unlink(running.path / "identities" / f"{directory & 0xFF:02x}" / f"{directory:016x}")
    running.lose_power()
    settle(running.start())
    return lost


def test_blocks_that_lost_their_directory_wait_for_a_day(running: Host) -> None:
    lost = lose_directory(running, 3)
    store = running.store
    assert tree(store) == {}
    assert names_kept(running) == lost  # a draft has no identity, and is gone
    assert strays(store)["files"] == 3
    assert strays(store)["bytes"] == sum(
        (running.path / "strays" / f"{ino:016x}").stat().st_blocks * 512 for ino in lost
    )
    assert {ino for ino, _, _ in (running.stop(), running.check())[1].strays} == lost
    now_ns = max(since_ns for _, _, since_ns in running.check().strays)
    store = running.start()  # a clean stop keeps them, and since when
    store.turn_age_clock(lambda: now_ns + DAY_NS - SECOND_NS)
    settle(store)
    assert names_kept(running) == lost
    store.turn_age_clock(lambda: now_ns + DAY_NS)
    settle(store)
    assert names_kept(running) == set()
    assert (strays(store)["files"], strays(store)["bytes"], strays(store)["gave_way"]) == (0, 0, 0)
    running.stop()
    assert running.check().problems == []


def test_they_go_before_any_block_when_the_pool_needs_their_room(running: Host) -> None:
    lost = lose_directory(running, 6, MIB)
    store = running.store
    held_bytes = strays(store)["bytes"]
    assert held_bytes >= 6 * MIB
    for number in range(11):
        put(store, ROOT_INODE, b"new %d" % number, b"n" * MIB)
        settle(store)
    assert store.evicted_blocks == 0
    assert names_kept(running) < lost
    assert strays(store)["gave_way"] > 0
    assert strays(store)["bytes"] < held_bytes
    assert store.space.taken_bytes <= CAPACITY_BYTES


def test_a_repair_keeps_them_and_without_a_grace_nothing_is_kept(running: Host) -> None:
    lost = lose_directory(running, 2)
    running.stop()
    for ino in lost:  # as if they had never been moved
        os.rename(running.path / "strays" / f"{ino:016x}", running.extent(ino))
    assert running.check(repair=True).repaired == 2
    assert names_kept(running) == lost
    for ino in lost:
        os.rename(running.path / "strays" / f"{ino:016x}", running.extent(ino))
    running.settings = dataclasses.replace(running.settings, stray_grace_s=0)
    running.start()
    running.kill()
    settle(running.start())
    assert names_kept(running) == set()
    assert not any(running.extent(ino).exists() for ino in lost)


def test_of_too_many_the_oldest_go(running: Host) -> None:
    running.kill()
    running.settings = dataclasses.replace(running.settings, strays_max=2)
    running.start()
    lose_directory(running, 5)
    assert len(names_kept(running)) == 2
    assert strays(running.store)["gave_way"] == 3
