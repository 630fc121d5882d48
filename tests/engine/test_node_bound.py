"""What is never evicted, and costs a user nothing to make, takes a part of the pool only."""

from collections.abc import Iterator

import pytest

from kvfs.errors import NoSpace
from kvfs.node_bound import admits, taken_bytes
from kvfs.records import Counters
from tests.support.stores import DIRECTORY, MIB, SYMLINK, Host, host, make_directory, put

USER = 1000
CAPACITY_BYTES = 64 * MIB


@pytest.fixture
def running() -> Iterator[Host]:
    with host(capacity_bytes=CAPACITY_BYTES) as made:
        made.start()
        yield made


def test_what_is_evicted_costs_nothing_here() -> None:
    rows_bytes = 550 * 10_000
    assert taken_bytes(Counters(blocks=10_000), rows_bytes) == 0
    assert taken_bytes(Counters(directories=10), 5000) == 10 * 1024 + 5000
    assert taken_bytes(Counters(symlinks=10), 5000) == 10 * 5 * 1024 + 5000


def test_the_bound_is_a_share_of_the_capacity() -> None:
    assert admits(Counters(symlinks=50_000), 20 * MIB, 2048 * MIB)
    assert not admits(Counters(symlinks=50_000), 20 * MIB, 512 * MIB)
    assert admits(Counters(directories=65_536), 32 * MIB, 512 * MIB)


@pytest.mark.parametrize("target", [b"t", b"t" * 4000])
def test_a_user_makes_symlinks_up_to_the_bound_and_others_store_on(
    running: Host, target: bytes
) -> None:
    store = running.store
    mine = make_directory(running, b"mine", uid=USER)
    made = 0
    with pytest.raises(NoSpace, match="share"):  # noqa: PT012
        for made in range(100_000):
            store.namespace.make_node(mine, b"%06d" % made, SYMLINK, USER, 0, target)
    held_bytes = taken_bytes(store.pool.counters, store.pool.index.room.rows_bytes())
    assert CAPACITY_BYTES // 4 <= held_bytes < CAPACITY_BYTES // 3
    for refused in (DIRECTORY, SYMLINK):
        with pytest.raises(NoSpace):
            store.namespace.make_node(mine, b"one", refused, USER, 0, b"t")
    with pytest.raises(NoSpace):
        store.attributes.set_xattr(mine, b"user.large", b"x" * 4000, USER)
    make_directory(running, b"root's")
    put(store, mine, b"block", b"x" * MIB)
    for number in range(made // 2):
        store.namespace.unlink(mine, b"%06d" % number)
    store.namespace.make_node(mine, b"one", SYMLINK, USER, 0, b"t")
