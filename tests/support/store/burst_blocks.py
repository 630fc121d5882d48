"""A small pool, and blocks stored in it a burst each: the order of their eviction is known."""

from typing import Final

from kvfs.core.eviction_policy import Rank
from kvfs.core.types import ROOT_INODE, InodeNo
from tests.support.store.driven import Driven
from tests.support.store.stores import FILE, MIB, write

CAPACITY_BYTES: Final = 64 * MIB
BLOCK_BYTES: Final = 4 * MIB
#: So many blocks fit.
FITS: Final = CAPACITY_BYTES // BLOCK_BYTES


def stored(
    store: Driven, name: bytes, parent: InodeNo = ROOT_INODE, *, uid: int = 0, gid: int = 0
) -> InodeNo:
    """Store a block of BLOCK_BYTES, in a burst of its own."""
    opened, _ = store.create(parent, name + b".tmp", FILE, uid, gid)
    write(store, opened, name[:1] * BLOCK_BYTES)
    store.close(opened, writer=True)
    store.rename(parent, name + b".tmp", parent, name, replace=True)
    store.tick_heat(store.now_s() + 10 * len(store.heat()))
    return opened.ino


def flood(store: Driven, blocks: int) -> None:
    """Store so many blocks that nobody asks for."""
    for number in range(blocks):
        stored(store, b"flood%d" % number)


def ranks(store: Driven, *inos: InodeNo) -> list[Rank]:
    """Return the rank of each block."""
    return [store.heat()[ino].rank for ino in inos]
