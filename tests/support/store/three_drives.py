"""A store on three drives of the same size, and blocks on each, for tests of one that fails."""

import contextlib
from collections.abc import Iterator
from typing import Final

from kvfs.core.drives import Numbering
from kvfs.core.types import ROOT_INODE
from tests.support.store.loop_guard import LoopGuard
from tests.support.store.stores import MIB, Host, host, put

DRIVES: Final = 3


@contextlib.contextmanager
def three_drives(guard: LoopGuard) -> Iterator[Host]:
    """Yield a host whose store runs on three new drives of the same size."""
    with host(others_bytes=[64 * MIB] * (DRIVES - 1)) as made:
        made.start(guard)
        yield made


def store_nine(pool: Host) -> dict[int, dict[bytes, bytes]]:
    """Store nine blocks; return the paths of each drive, with what they hold."""
    found: dict[int, dict[bytes, bytes]] = {drive: {} for drive in range(DRIVES)}
    for number in range(9):
        data = b"%d" % number * 5000
        ino = put(pool.store, ROOT_INODE, b"%d" % number, data)
        found[Numbering(DRIVES).drive(ino)][b"/%d" % number] = data
    assert [len(paths) for paths in found.values()] == [3, 3, 3]
    return found
