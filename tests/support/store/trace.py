"""A trace of prompts, and what an XFS beside a cleaner would find of it.

``conversation.trace.gz`` is the Mooncake project's FAST'25 conversation trace (Apache-2.0, see
LICENSE-mooncake-Apache-2.0.txt beside it), changed in form only: in plain words, as
kvfs/bench/replay/trace.py reads them, with blocks of 512 tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from kvfs.bench.replay.trace import Request
from kvfs.bench.simulate.served import Outcome

TRACE: Final = Path(__file__).parents[2] / "traces" / "conversation.trace.gz"


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
