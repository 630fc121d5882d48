"""The heat of a pool directory, as tests open it and look at it."""

import random
from typing import Final

from kvfs.core.account import Entitlements
from kvfs.core.eviction_policy import Lru, Rank, policy_named
from kvfs.core.types import InodeNo
from kvfs.storage.heat import Heat
from kvfs.storage.syscalls import Syscalls

MIB: Final = 1 << 20
NOW_S: Final = 1_790_000_000
EPOCH: Final = 7


def opened(
    pool_fd: int,
    *,
    epoch: int = EPOCH,
    policy: str = "lru",
    syscalls: Syscalls | None = None,
    read_only: bool = False,
    now_s: int = NOW_S,
    idle_s: float = 0.0,
) -> Heat:
    """Return the heat of the pool, as a start finds it."""
    return Heat(
        [pool_fd],
        syscalls or Syscalls(),
        epoch=epoch,
        read_only=read_only,
        policy=policy_named(policy),
        now_s=now_s,
        entitlements=Entitlements({}, idle_s),
    )


def note(heat: Heat, *inos: int, rank: Rank = Rank.PUBLISHED) -> None:
    """Store blocks of a MiB."""
    for ino in inos:
        heat.put(InodeNo(ino), MIB, rank, ino)


def order(heat: Heat) -> list[int]:
    """Return all that may go, first to last."""
    found = Lru().victims(heat.columns(), bytes_wanted=1 << 60, count_max=1 << 30)
    return [int(ino) for ino in found]


def touches(heat: Heat, ino: int) -> int:
    """Return in how many bursts *ino* was touched."""
    columns = heat.columns()
    return int(columns.touches[columns.ino == ino][0])


def filled(pool_fd: int) -> Heat:
    """Return a saved heat in which 1500 blocks were touched in an order of their own."""
    heat = opened(pool_fd)
    note(heat, *range(20, 1520))
    note(heat, 5, rank=Rank.ORPHAN_SLAB)
    for ino in random.Random(1).sample(range(20, 1520), 700):
        heat.touch(InodeNo(ino))
    for ino in range(100, 150):
        heat.drop(InodeNo(ino))
    heat.save()
    return heat
