"""The most that any pool could find: it knows the future, and takes only what will be found.

Belady's rule with admission: of the blocks that are there or come, those that are asked for soonest
stay (Belady, IBM Systems Journal 1966). Of the blocks of one prompt the head stays before the tail.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvfs.bench.replay.trace import Request
from kvfs.bench.simulate.served import Outcome

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
