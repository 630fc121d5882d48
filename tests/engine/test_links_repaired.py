"""fsck: a block with two names whose rows do not agree; it keeps its own name, if that is right."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from kvfs.core.errors import KvfsError
from kvfs.core.inode_rules import alias_of, lead_to, with_alias, without_alias
from kvfs.core.records import child_key, inode_key, name_key
from kvfs.core.types import ROOT_INODE, InodeNo, InodeRecord
from kvfs.storage.index import Index
from kvfs.storage.index_transaction import WriteTransaction
from tests.support.store.stores import (
    FILE,
    MIB,
    Host,
    assert_exact,
    assert_no_strays,
    get,
    host,
    settle,
    tree,
    write,
)

pytestmark = pytest.mark.usefixtures("caplog")


class Pool(NamedTuple):
    """A stopped pool: /K and /K.tmp are one block, /other is another."""

    host: Host
    block: InodeNo
    alias: InodeNo
    other: InodeNo


@pytest.fixture
def pool() -> Iterator[Pool]:
    with host(index_place="pool") as made:
        store = made.start()
        inos: list[InodeNo] = []
        for name in (b"K.tmp", b"other"):
            opened, _ = store.create(ROOT_INODE, name, FILE, 0, 0)
            write(store, opened, name * 1000)
            store.close(opened, writer=True)
            inos.append(opened.ino)
        store.link(inos[0], ROOT_INODE, b"K")
        alias = alias_of(store.record(inos[0]))
        made.stop()
        assert made.check().problems == []
        yield Pool(made, inos[0], alias, inos[1])


def change(pool: Pool, ino: InodeNo, to: Callable[[InodeRecord], InodeRecord]) -> None:
    """Write another record of *ino*."""

    def put(txn: WriteTransaction) -> None:
        record = txn.inode(ino)
        assert record is not None
        txn.put_inode(ino, to(record))

    write_rows(pool, put)


def write_rows(pool: Pool, do: Callable[[WriteTransaction], object]) -> None:
    path = str(pool.host.path / "index")
    with Index(path, map_size_bytes=64 * MIB, preallocate_bytes=MIB) as index:
        with index.write() as txn:
            do(txn)
        index.sync()


def spoil(pool: Pool, key: bytes, value: bytes | None) -> None:
    write_rows(pool, lambda txn: txn._rows.update({key: value}))


DAMAGE: dict[str, tuple[Callable[[Pool], None], set[bytes]]] = {
    "the alias's name leads nowhere": (
        lambda pool: spoil(pool, name_key(ROOT_INODE, b"K.tmp"), None),
        {b"/K", b"/K.tmp"},
    ),
    "the alias's name is damaged": (
        lambda pool: spoil(pool, name_key(ROOT_INODE, b"K.tmp"), b"garbage"),
        {b"/K", b"/K.tmp"},
    ),
    "the alias is not listed": (
        lambda pool: spoil(pool, child_key(ROOT_INODE, pool.alias), None),
        {b"/K", b"/K.tmp"},
    ),
    "the block's name leads nowhere": (
        lambda pool: spoil(pool, name_key(ROOT_INODE, b"K"), None),
        {b"/K", b"/K.tmp"},
    ),
    "the alias's record is damaged": (
        lambda pool: spoil(pool, inode_key(pool.alias), b"garbage"),
        {b"/K"},
    ),
    "the alias's record is missing": (
        lambda pool: spoil(pool, inode_key(pool.alias), None),
        {b"/K"},
    ),
    "the block's record is damaged": (
        lambda pool: spoil(pool, inode_key(pool.block), b"garbage"),
        set(),
    ),
    "the block has no alias": (
        lambda pool: change(pool, pool.block, without_alias),
        {b"/K"},
    ),
    "the block has another alias": (
        lambda pool: change(pool, pool.block, lambda record: with_alias(record, pool.other)),
        {b"/K"},
    ),
    "the block is its own alias": (
        lambda pool: change(pool, pool.block, lambda record: with_alias(record, pool.block)),
        {b"/K"},
    ),
    "the alias is of another block": (
        lambda pool: change(pool, pool.alias, lambda record: lead_to(record, pool.other)),
        {b"/K"},
    ),
    "the alias is its own block": (
        lambda pool: change(pool, pool.alias, lambda record: lead_to(record, pool.alias)),
        {b"/K"},
    ),
    "the alias has no block": (
        lambda pool: change(pool, pool.alias, without_alias),
        {b"/K"},
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_block_keeps_the_names_that_are_right(pool: Pool, damage: str) -> None:
    do, left = DAMAGE[damage]
    do(pool)
    assert pool.host.check().problems != []
    assert pool.host.check(repair=True).problems != []
    assert pool.host.check().problems == []
    store = pool.host.start()
    assert tree(store) == {
        b"/other": b"other" * 1000,
        **dict.fromkeys(left, b"K.tmp" * 1000),
    }
    settle(store)
    assert_exact(pool.host)
    assert_no_strays(store)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_server_goes_on_with_what_is_wrong(pool: Pool, damage: str) -> None:
    """No request fails in an unforeseen way, and none leads to other bytes; fsck is for later."""
    DAMAGE[damage][0](pool)
    store = pool.host.start()
    store.tick()
    store.end_leases(store.now_s() + 1e9)
    for name in (b"K", b"K.tmp"):
        with contextlib.suppress(KvfsError):
            assert get(store, ROOT_INODE, name) == b"K.tmp" * 1000
        with contextlib.suppress(KvfsError):
            store.unlink(ROOT_INODE, name)
    assert get(store, ROOT_INODE, b"other") == b"other" * 1000
