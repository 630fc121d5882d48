"""A pool with room in memory for new blocks, and blocks of one size in it."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final

from kvfs.core.types import ROOT_INODE, InodeNo
from tests.support.store.stores import MIB, Host, host, put

SIZE_BYTES: Final = 64 << 10
ROOM_BYTES: Final = 1 * MIB


@contextlib.contextmanager
def probation_host(others_bytes: Sequence[int] = ()) -> Iterator[Host]:
    """Yield a host whose store has room in memory, and knows how large blocks are."""
    with host(others_bytes=others_bytes) as made:
        made.give_memory(ROOM_BYTES)
        made.start_outliving()
        put(made.store, ROOT_INODE, b"first", content(99))
        try:
            yield made
        finally:
            made.forget_outliving()


def content(number: int) -> bytes:
    """Return the bytes of a block."""
    return bytes([number]) * SIZE_BYTES


def store_some(pool: Host, count: int = 4) -> list[InodeNo]:
    """Store blocks that are in memory; return them."""
    inos = [put(pool.store, ROOT_INODE, b"%d" % at, content(at)) for at in range(count)]
    assert pool.store.in_memory == set(inos)
    return inos


def paths(count: int = 4) -> dict[bytes, bytes]:
    """Return what is there then."""
    stored = {b"/%d" % at: content(at) for at in range(count)}
    return {b"/first": content(99), **stored}


def publish(pool: Host, name: bytes, data: bytes) -> InodeNo:
    """Store a block as connectors do; it belongs to no process afterwards."""
    ino = put(pool.store, ROOT_INODE, name + b".tmp", data)
    pool.store.rename(ROOT_INODE, name + b".tmp", ROOT_INODE, name)
    return ino


def copies(pool: Host, ino: InodeNo) -> int:
    """Return how many files there are of *ino*, in memory and on drives."""
    return len(list(pool.path.parent.rglob(f"{ino:016x}")))
