"""Checksums of blocks that got none at first, and the doubt that a power loss leaves."""

import dataclasses
import os
from collections.abc import Iterator

import pytest

from kvfs.core.checksum import crc32c
from kvfs.core.errors import NoSuchAttribute
from kvfs.core.types import ROOT_INODE, InodeNo
from tests.support.clients.stepping import until
from tests.support.devices.power_cuts.power import Cut, Drive, drive
from tests.support.kernel.caches import forget_pages
from tests.support.store.driven import Driven
from tests.support.store.driven_faults import set_limit
from tests.support.store.stores import put, settle

pytestmark = [pytest.mark.needs_loop, pytest.mark.usefixtures("caplog")]

CRC = b"user.kvfs.crc32c"
BYTES = b"b" * 5000


@pytest.fixture
def powered() -> Iterator[Drive]:
    with drive() as made:
        yield made


def doubtful(store: Driven) -> bool:
    return bool(store.describe()["checksums"]["doubtful"])


def restart(powered: Drive) -> Driven:
    powered.stop()
    return powered.start()


def cut_with(powered: Drive, count: int) -> tuple[Driven, list[InodeNo]]:
    """Store blocks, make them durable with their checksums, and cut the power."""
    store = powered.start()
    inos = [put(store, ROOT_INODE, b"%d" % number, BYTES) for number in range(count)]
    store.sync()
    powered.cut(Cut.NOTHING)
    store = powered.start()
    settle(store)
    return store, inos


def test_the_doubt_outlives_clean_stops_until_opens_have_covered_all(powered: Drive) -> None:
    store, inos = cut_with(powered, 3)
    assert doubtful(store)
    assert store.compare(inos[0])
    store = restart(powered)
    assert doubtful(store)
    assert store.is_doubted(inos[0])  # which ones it was is not kept
    young = put(store, ROOT_INODE, b"young", BYTES)
    for ino in inos[:2]:
        assert store.compare(ino)
    store = restart(powered)
    assert store.is_doubted(inos[2])
    assert not store.is_doubted(young)
    for ino in inos:
        assert store.compare(ino)
    store = restart(powered)
    assert not doubtful(store)
    assert not store.is_doubted(inos[0])


@pytest.mark.parametrize("cuts_index", [True, False])
def test_a_kill_and_fsck_leave_the_doubt(powered: Drive, *, cuts_index: bool) -> None:
    store, inos = cut_with(powered, 2)
    if cuts_index:
        powered.cut(Cut.NOTHING)
    else:
        powered.kill()
    powered.repair()
    store = powered.start()
    assert doubtful(store)
    assert all(store.is_doubted(ino) for ino in inos)


def test_the_scrub_ends_the_doubt_and_gives_checksums_to_those_without(powered: Drive) -> None:
    powered.settings = dataclasses.replace(
        powered.settings, checksum_share=0, checksum_stop_s=0, verify="scrub"
    )
    store, inos = cut_with(powered, 3)
    assert store.describe()["checksums"]["made"] == 0

    def is_done() -> bool:
        store.tick()
        return bool(store.describe()["checksums"]["rounds"])

    until(is_done, "a round of the scrub")
    assert store.describe()["checksums"]["given"] == 3
    assert store.xattr(inos[0], CRC) == b"%08x" % crc32c(BYTES)
    assert not doubtful(store)
    assert all(store.compare(ino) for ino in inos)
    powered.stop()
    assert powered.problems() == []


def test_the_scrub_passes_over_what_is_mostly_a_hole(powered: Drive) -> None:
    """To read a petabyte of it would take days, and a stop would wait for that."""
    powered.settings = dataclasses.replace(powered.settings, verify="scrub")
    store = powered.start()
    ino = put(store, ROOT_INODE, b"huge", b"x")
    opened = store.open(ino, writer=True, truncate=False)
    store.syscalls.pwrite(store.extent_fd(opened), b"x", (1 << 50) - 1)
    store.close(opened, writer=True)
    store.sync()

    def is_done() -> bool:
        store.tick()
        return bool(store.describe()["checksums"]["rounds"])

    until(is_done, "a round of the scrub")
    assert store.describe()["checksums"]["given"] == 0
    powered.stop()


@pytest.mark.parametrize("by", ["the pass", "a stop"])
@pytest.mark.parametrize("verify", ["doubtful", "open"])
def test_what_left_the_cache_gets_its_checksum_if_every_open_compares(
    powered: Drive, verify: str, by: str
) -> None:
    """As a block stored by O_DIRECT, whose bytes never were there: it is read from the device."""
    powered.settings = dataclasses.replace(powered.settings, verify=verify)
    store = powered.start()
    sizes_bytes = (1, 5000, (3 << 20) + 1)
    inos = []
    for size_bytes in sizes_bytes:
        ino = put(store, ROOT_INODE, b"%d" % size_bytes, b"b" * size_bytes)
        opened = store.open(ino, writer=False, truncate=False)
        os.fdatasync(store.extent_fd(opened))
        forget_pages(store.extent_fd(opened))
        store.close(opened, writer=False)
        inos.append(ino)
    if by == "the pass":
        store.sync()
    else:
        store = restart(powered)
    for ino, size_bytes in zip(inos, sizes_bytes, strict=True):
        if verify == "open":
            assert store.xattr(ino, CRC) == b"%08x" % crc32c(b"b" * size_bytes)
        else:
            with pytest.raises(NoSuchAttribute):
                store.xattr(ino, CRC)


def test_what_a_stop_makes_durable_gets_its_checksum(powered: Drive) -> None:
    store = powered.start()
    ino = put(store, ROOT_INODE, b"block", BYTES)
    store = restart(powered)
    assert store.xattr(ino, CRC) == b"%08x" % crc32c(BYTES)
    powered.settings = dataclasses.replace(powered.settings, checksum_stop_s=0)
    powered.stop()
    store = powered.start()
    late = put(store, ROOT_INODE, b"late", BYTES)
    store = restart(powered)
    with pytest.raises(NoSuchAttribute):
        store.xattr(late, CRC)


def test_of_many_blocks_the_last_are_known_to_be_right(
    powered: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is forgotten is compared again."""
    set_limit(monkeypatch, "blocks known to be right", 2)
    store, inos = cut_with(powered, 3)
    for ino in inos:
        assert store.compare(ino)
    assert [store.is_doubted(ino) for ino in inos] == [True, False, False]


def test_a_round_that_could_not_look_at_a_block_leaves_the_doubt(powered: Drive) -> None:
    """Its name goes; whether the others are right is not known of that round."""
    store = powered.start()
    inos = [put(store, ROOT_INODE, b"%d" % number, BYTES) for number in range(3)]
    store.sync()
    powered.settings = dataclasses.replace(powered.settings, verify="scrub")
    powered.cut(Cut.NOTHING)
    store = powered.start()
    now_s = [store.now_s()]
    store.turn_clock(lambda: now_s[0])  # so that no round begins yet
    settle(store)
    fd = store.open_extent(inos[1], os.O_RDWR)
    os.setxattr(fd, "trusted.kvfs.fixed", bytes(64))
    os.close(fd)

    def ended(rounds: int) -> bool:
        now_s[0] += 2.0
        store.tick()
        return int(store.describe()["checksums"]["rounds"]) == rounds

    until(lambda: ended(1), "a round of the scrub")
    assert doubtful(store)
    until(lambda: ended(2), "the next round")
    assert not doubtful(store)


def test_a_command_that_could_not_look_at_a_block_leaves_the_doubt(powered: Drive) -> None:
    store, inos = cut_with(powered, 3)
    fd = store.open_extent(inos[1], os.O_RDWR)
    os.setxattr(fd, "trusted.kvfs.fixed", bytes(64))
    os.close(fd)
    assert store.verify_everything(inos).without == 1
    assert doubtful(store)
    store.verify_everything([inos[0], inos[2]])
    assert not doubtful(store)
