"""A trace of prompts, replayed against the heat and a policy as connectors would use a pool.

``conversation.trace.gz`` is the Mooncake project's FAST'25 conversation trace (Apache-2.0, see
LICENSE-mooncake-Apache-2.0.txt beside it), changed in form only: in plain words, as
kvfs/bench/replay/trace.py reads them, with blocks of 512 tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from kvfs.bench.replay.trace import Request
from kvfs.core.eviction_policy import Rank
from kvfs.core.types import FIRST_INODE, InodeNo
from kvfs.storage.heat import Heat

TRACE: Final = Path(__file__).parents[2] / "traces" / "conversation.trace.gz"
_BLOCK_BYTES: Final = 4 << 20


class Outcome(NamedTuple):
    """Shares of all accesses in percent: blocks of a prefix that was there; blocks written."""

    prefix_hits: float
    written: float


def replay(requests: Sequence[Request], heat: Heat, blocks_max: int) -> Outcome:
    """Serve *requests* from a pool of *blocks_max* blocks, which *heat* and its policy keep.

    A prompt looks its blocks up head first, loads those before the first missing one, touches
    the others that are there, and stores the rest.
    """
    present: dict[int, InodeNo] = {}
    block_of: dict[InodeNo, int] = {}
    hits = written = asked = 0
    next_ino = FIRST_INODE
    for request in requests:
        heat.run_due(request.at_s)
        asked += len(request.blocks)
        missing = [block for block in request.blocks if block not in present]
        hits += request.blocks.index(missing[0]) if missing else len(request.blocks)
        written += len(missing)
        lacking = len(present) + len(missing) - blocks_max
        for block in request.blocks:
            if block in present:
                heat.touch(present[block])
        while lacking > 0:  # a plan may name fewer
            victims = heat.policy.victims(
                heat.columns(), bytes_wanted=lacking * _BLOCK_BYTES, count_max=1 << 20
            )
            assert 0 < len(victims) <= lacking
            lacking -= len(victims)
            for ino in map(InodeNo, victims.tolist()):
                heat.evicted(ino)
                del present[block_of.pop(ino)]
        for block in missing:
            present[block], block_of[next_ino] = next_ino, block
            heat.put(next_ino, _BLOCK_BYTES, Rank.PUBLISHED, block)
            next_ino = InodeNo(next_ino + 1)
    return Outcome(100 * hits / asked, 100 * written / asked)


class Habits(NamedTuple):
    """An operator's cleaner: watermarks as shares of the room, and how often it looks (s)."""

    high: float
    low: float
    look_s: float


def replay_cleaned(requests: Sequence[Request], habits: Habits, blocks_max: int) -> Outcome:
    """Serve *requests* from a file system of *blocks_max* blocks beside a cleaner.

    It goes by atime under relatime: that of the store, and of the first load after it. A store that
    does not fit is refused.
    """
    atime: dict[int, int] = {}
    loaded: set[int] = set()
    hits = written = asked = now = 0
    next_s = 0.0
    for request in requests:
        if request.at_s >= next_s:
            next_s = (request.at_s // habits.look_s + 1) * habits.look_s
            surplus = len(atime) - int(habits.low * blocks_max)
            if len(atime) > habits.high * blocks_max:
                for block in sorted(atime, key=atime.__getitem__)[:surplus]:
                    del atime[block]
                    loaded.discard(block)
        asked += len(request.blocks)
        in_prefix = True
        for block in request.blocks:
            now += 1
            in_prefix = in_prefix and block in atime
            hits += in_prefix
            if in_prefix and block not in loaded:
                atime[block] = now
                loaded.add(block)
            elif block not in atime and len(atime) < blocks_max:
                atime[block] = now
                written += 1
    return Outcome(100 * hits / asked, 100 * written / asked)
