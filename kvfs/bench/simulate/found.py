"""What a cache finds of a trace, worked out without serving it: one by LRU, and the best there is.

By LRU it is read off the reuse distances, for all sizes at once. The best one knows the future, and
takes only what will be found: Belady's rule with admission. Of the blocks that are there or come,
those that are asked for soonest stay (Belady, IBM Systems Journal 1966). Of the blocks of one
prompt the head stays before the tail.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvfs.bench.replay.trace import Request, footprint
from kvfs.bench.simulate.served import Outcome
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


_NEVER: Final = -1


class _Stay(NamedTuple):
    """Until when a block must stay, and how deep it lies in that prompt; the largest goes first."""

    until: int
    depth: int


def best_possible(
    requests: Sequence[Request], blocks_max: int, count: Callable[[], None] | None = None
) -> Outcome:
    """Return what the best pool of *blocks_max* blocks finds and writes of *requests*.

    *count* is called after each request.
    """
    later = _next_uses(requests)
    stays: dict[int, _Stay] = {}
    fresh: set[int] = set()
    farthest: list[tuple[int, int, int]] = []
    hits = written = asked = 0
    for request, nexts in zip(requests, later, strict=True):
        asked += len(request.blocks)
        in_prefix = True
        for depth, (block, following) in enumerate(zip(request.blocks, nexts, strict=True)):
            is_held = block in stays
            in_prefix = in_prefix and is_held
            hits += in_prefix
            if is_held and block in fresh:
                fresh.remove(block)
                written += 1  # a block that nobody asks for again is not written
            if following == _NEVER:
                stays.pop(block, None)
                continue
            stay = _Stay(following, depth)
            if not is_held:
                if len(stays) >= blocks_max and not _gave_way(stays, fresh, farthest, stay):
                    continue
                fresh.add(block)
            stays[block] = stay
            heapq.heappush(farthest, (-following, -depth, block))
        if count is not None:
            count()
    return Outcome(100 * hits / asked, 100 * written / asked)


def _gave_way(
    stays: dict[int, _Stay],
    fresh: set[int],
    farthest: list[tuple[int, int, int]],
    stay: _Stay,
) -> bool:
    """Evict the block that is asked for last; False if that is the one that comes with *stay*."""
    while True:
        until, depth, block = farthest[0]
        if stays.get(block) == (-until, -depth):
            break
        heapq.heappop(farthest)  # it was asked for meanwhile
    if stays[block] <= stay:
        return False
    heapq.heappop(farthest)
    del stays[block]
    fresh.discard(block)
    return True


def _next_uses(requests: Sequence[Request]) -> list[list[int]]:
    """Return for each block of each request the number of the next request for it, or _NEVER."""
    following: dict[int, int] = {}
    found = []
    for number in range(len(requests) - 1, -1, -1):
        blocks = requests[number].blocks
        found.append([following.get(block, _NEVER) for block in blocks])
        following.update(dict.fromkeys(blocks, number))
    return found[::-1]
