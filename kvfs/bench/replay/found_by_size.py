"""How much of a trace a cache of some size finds, without serving it: from reuse distances."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from kvfs.bench.replay.trace import Request, footprint
from kvfs.core.errors import TraceUnreadable
from kvfs.core.reuse import ReuseDistances

#: Sizes that are tried, as shares of all blocks of the trace.
SHARES: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)


class TraceLoad(NamedTuple):
    """What a trace asks for, in blocks; hit rates by the number of blocks that a cache holds."""

    requests: int
    blocks: int
    accesses: int
    span_s: float
    best: float
    """The hit rate of a cache that holds everything."""
    found: dict[int, float]

    def least_for(self, part: float) -> int:
        """Return the fewest blocks of those tried that find *part* of what any cache can find."""
        enough = (blocks for blocks, rate in self.found.items() if rate >= part * self.best)
        return next(enough, self.blocks)

    def found_with(self, blocks: int) -> float:
        """Return the hit rate of a cache of *blocks*: that of the largest size tried below it."""
        return max((rate for size, rate in self.found.items() if size <= blocks), default=0.0)


def load_of(requests: Sequence[Request], more_sizes: Sequence[int] = ()) -> TraceLoad:
    """Return what *requests* ask for, with the hit rates at SHARES and *more_sizes* blocks.

    By LRU, which keeps a prompt's first blocks longest, as kvfs does. Raises TraceUnreadable if all
    came at one moment.
    """
    span_s = requests[-1].at_s - requests[0].at_s
    if span_s <= 0:
        raise TraceUnreadable("all requests of the trace came at one moment: it tells no rate")
    blocks = footprint(requests)
    # Sizes in blocks of one byte, and every name is followed.
    distances = ReuseDistances(blocks + 1, blocks)
    number: dict[int, int] = {}
    repeated = 0
    for request in requests:
        for block in reversed(request.blocks):
            if (name := number.get(block)) is not None:
                repeated += 1
                distances.load(name, 1)
            else:
                name = number[block] = len(number)
                distances.miss(name)
                distances.store(name, 1)
        distances.count(len(request.blocks))
    sizes = sorted({max(1, round(share * blocks)) for share in SHARES} | set(more_sizes))
    accesses = sum(len(request.blocks) for request in requests)
    found = {point.size_bytes: point.hit_rate for point in distances.curve(sizes)}
    return TraceLoad(len(requests), blocks, accesses, span_s, repeated / accesses, found)
