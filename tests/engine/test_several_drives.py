"""One store on several drives: each block on one, and all of them one pool, however it ends."""

import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import hypothesis
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from kvfs.core.drives import Numbering
from kvfs.core.errors import NotAtHand
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.machine.processes import Maker
from tests.support.store.serving import Serving
from tests.support.store.stores import (
    FILE,
    MIB,
    SYMLINK,
    Host,
    assert_exact,
    assert_no_strays,
    get,
    host,
    make_directory,
    put,
    settle,
    tree,
    write,
)

pytestmark = pytest.mark.usefixtures("caplog")

_DRIVES = 3
BLOCKS = {b"block %d" % at: b"%d" % at * 5000 for at in range(12)}


@pytest.fixture
def pool() -> Iterator[Host]:
    """Yield a host whose store runs on three new drives of the same size."""
    with host(others_bytes=[64 * MIB] * (_DRIVES - 1)) as made:
        made.start()
        yield made


def store_all(pool: Host) -> list[InodeNo]:
    return [put(pool.store, ROOT_INODE, name, data) for name, data in BLOCKS.items()]


def by_drive(inos: list[InodeNo]) -> Counter[int]:
    return Counter(map(Numbering(_DRIVES).drive, inos))


def paths() -> dict[bytes, bytes]:
    return {b"/" + name: data for name, data in BLOCKS.items()}


def test_blocks_take_the_drives_in_turn(pool: Host) -> None:
    inos = store_all(pool)
    assert by_drive(inos) == {at: len(BLOCKS) // _DRIVES for at in range(_DRIVES)}
    assert all(pool.extent(ino).exists() for ino in inos)
    assert tree(pool.store) == paths()


def test_drives_get_blocks_by_what_they_hold() -> None:
    with host(capacity_bytes=32 * MIB, others_bytes=[64 * MIB]) as made:
        made.start()
        inos = store_all(made)
        assert Counter(map(Numbering(2).drive, inos)) == {0: 4, 1: 8}


def test_a_removed_block_leaves_its_drive(pool: Host) -> None:
    inos = store_all(pool)
    for name in BLOCKS:
        pool.store.unlink(ROOT_INODE, name)
    settle(pool.store)
    assert not any(pool.extent(ino).exists() for ino in inos)
    assert_no_strays(pool.store)


def test_directories_and_symlinks_are_on_the_first_drive(pool: Host) -> None:
    inos = [make_directory(pool, b"directory %d" % at) for at in range(4)]
    inos.append(pool.store.make_node(ROOT_INODE, b"symlink", SYMLINK, 0, 0, b"target")[0])
    assert by_drive(inos) == {0: 5}


@pytest.mark.parametrize("end", ["stop", "kill", "lose_power"])
def test_all_durable_blocks_are_there_after_any_end(pool: Host, end: str) -> None:
    inos = store_all(pool)
    if end == "lose_power":
        pool.store.sync()
    getattr(pool, end)()
    store = pool.start()
    assert tree(store) == paths()
    settle(store)
    assert_exact(pool)
    assert_no_strays(store)
    assert min(map(Numbering(_DRIVES).serial, [put(store, ROOT_INODE, b"new", b"x")])) > max(
        map(Numbering(_DRIVES).serial, inos)
    ), "no serial number is given out twice"
    pool.stop()
    assert not pool.check().problems


def test_strays_of_each_drive_are_swept(pool: Host) -> None:
    inos = store_all(pool)
    strays = [InodeNo(ino + 0x1000) for ino in inos[:_DRIVES]]
    for ino in strays:
        pool.extent(ino).parent.mkdir(parents=True, exist_ok=True)
        pool.extent(ino).write_bytes(b"nobody's")
    pool.kill()
    settle(pool.start())
    assert not any(pool.extent(ino).exists() for ino in strays)
    assert tree(pool.store) == paths()


def test_an_index_that_went_back_takes_in_young_blocks_of_all_drives(pool: Host) -> None:
    pool.stop()
    logged = replace(pool.settings, index_log_s=1e-9)
    store = pool.start(settings=logged)
    store_all(pool)
    store.sync()
    pool.kill()
    pool.pretend_reboot()
    store = pool.start(settings=logged)
    assert tree(store) == paths()
    settle(store)
    assert_exact(pool)


def test_a_full_pool_evicts_in_one_order_over_all_drives() -> None:
    with host(capacity_bytes=32 * MIB, others_bytes=[32 * MIB]) as made:
        store = made.start()
        for number in range(48):
            put(store, ROOT_INODE, b"tmp", b"x" * (4 * MIB))
            store.rename(ROOT_INODE, b"tmp", ROOT_INODE, b"%02d" % number, replace=True)
        left = sorted(tree(store))
        assert left == [b"/%02d" % number for number in range(32, 48)]
        inos = [store.lookup(ROOT_INODE, name[1:]) for name in left]
        assert Counter(map(Numbering(2).drive, inos)) == {0: 8, 1: 8}
        settle(store)
        assert_exact(made)


def test_while_requests_are_served_each_drive_makes_its_extents(pool: Host) -> None:
    pool.stop()
    client = Serving(pool)
    for _ in range(3):
        client.tick()
    for name, data in BLOCKS.items():
        client.ask(lambda name=name, data=data: put(client.store, ROOT_INODE, name, data))
    for name, data in BLOCKS.items():
        assert client.ask(lambda name=name: get(client.store, ROOT_INODE, name)) == data
    inos = [client.store.lookup(ROOT_INODE, name) for name in BLOCKS]
    assert len(by_drive(inos)) == _DRIVES


def test_a_create_that_asks_again_has_one_turn(pool: Host) -> None:
    """As on a mount, where one that lacks an extent is handed on, and asks anew there."""
    pool.stop()
    client = Serving(pool)
    inos: list[InodeNo] = []

    def create() -> None:
        name = b"%d" % len(inos)
        opened, _ = client.store.create(ROOT_INODE, name, FILE, 0, 0, maker=WRITERS[0])
        inos.append(opened.ino)

    for number in range(4 * _DRIVES * len(BLOCKS)):  # more than are ready at first
        for _ in range(2):
            if len(inos) == number:
                with contextlib.suppress(NotAtHand):
                    create()
        if len(inos) == number:
            client.ask(create)
    drives = [Numbering(_DRIVES).drive(ino) for ino in inos]
    assert drives == [(drives[0] + number) % _DRIVES for number in range(len(drives))]


# ---- chains ----

WRITERS = [Maker(1000 + number, 1) for number in range(4)]


def store_chains(
    made: Host, lengths: list[int], seed: int
) -> dict[tuple[InodeNo, Maker], list[int]]:
    """Store a block of any chain next, until each has its length; return the drives of each."""
    store, mixed = made.store, random.Random(seed)
    directories = [make_directory(made, b"model %d" % number) for number in range(4)]
    chains = [(directory, writer) for directory in directories for writer in WRITERS]
    left = {chain: length for chain, length in zip(chains, lengths, strict=True) if length}
    found: dict[tuple[InodeNo, Maker], list[int]] = {chain: [] for chain in chains}
    while left:
        chain = mixed.choice(sorted(left))
        directory, writer = chain
        name = b"%d %d" % (writer.tgid, left[chain])
        opened, _ = store.create(directory, name, FILE, 0, 0, maker=writer)
        write(store, opened, b"x" * 100)
        store.close(opened, writer=True)
        found[chain].append(Numbering(len(made.drives)).drive(opened.ino))
        left[chain] -= 1
        if not left[chain]:
            del left[chain]
    return found


@given(lengths=st.lists(st.integers(0, 9), min_size=16, max_size=16), seed=st.integers(0, 1 << 30))
@hypothesis.settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_chain_takes_turns_of_its_own(lengths: list[int], seed: int) -> None:
    """So that a reader of one finds all drives busy, however many were written at once."""
    with host(others_bytes=[64 * MIB] * (_DRIVES - 1)) as made:
        made.start()
        for drives in store_chains(made, lengths, seed).values():
            first = drives[0] if drives else 0
            assert drives == [(first + number) % _DRIVES for number in range(len(drives))]


def test_the_turns_of_a_chain_are_by_what_drives_can_hold() -> None:
    with host(capacity_bytes=32 * MIB, others_bytes=[64 * MIB]) as made:
        made.start()
        for drives in store_chains(made, [9] * 16, 5).values():
            assert Counter(drives) == {0: 3, 1: 6}


def test_chains_begin_in_turn(pool: Host) -> None:
    """One block in each of many directories: they are on all drives."""
    inos = [
        put(pool.store, make_directory(pool, b"%d" % number), b"block", b"x") for number in range(9)
    ]
    assert by_drive(inos) == dict.fromkeys(range(_DRIVES), 3)


def test_only_so_many_chains_are_remembered(pool: Host) -> None:
    store = pool.store
    most = 4096
    for number in range(most + 10):
        opened, _ = store.create(ROOT_INODE, b"x", FILE, 0, 0, maker=Maker(1 + number, 1))
        store.close(opened, writer=True)
        store.unlink(ROOT_INODE, b"x")
    assert store.chains == most
