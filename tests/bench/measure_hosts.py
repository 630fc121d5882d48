"""What hosts find of a trace that they serve together: by the router, from peers, from all of them.

``python -m tests.bench.measure_hosts [HOSTS]``. Serves the recorded trace from pools in memory, one
a host, each with an equal part of a size: the least recently used block goes. A prompt goes to a
host by turns, or to the one that served the longest part of its head, unless that has far more to
do than the others. A host finds the head of a prompt in its own pool, then in those of its peers,
then among all that was ever stored, as in an object store without an end. Prints JSON: shares of
all accesses. Not collected by pytest.
"""

import json
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import count, takewhile
from typing import Any, Final

from kvfs.bench.replay.trace import Request, footprint, read_trace
from tests.support.store.trace import TRACE

HOSTS: Final = 8
#: Sizes of all pools together, in percent of the trace's blocks.
SHARES: Final = (10, 40, 80)
#: A host that has served so many times as many blocks as the mean gets no further prompt.
BUSY: Final = 1.25

#: Returns the host for a prompt.
Router = Callable[[Request], int]


def by_turns(hosts: int) -> Router:
    """A router that knows nothing."""
    numbers = count()
    return lambda _: next(numbers) % hosts


def by_prefix(hosts: int) -> Router:
    """A router that knows which host served each block last, and how much each has served."""
    served_at: dict[int, int] = {}
    served = Counter(dict.fromkeys(range(hosts), 0))

    def choose(request: Request) -> int:
        known = list(takewhile(served_at.__contains__, request.blocks))
        most = BUSY * (served.total() / hosts) + len(request.blocks)
        host = served_at[known[-1]] if known else -1
        if host < 0 or served[host] > most:
            host = min(served, key=served.__getitem__)
        served[host] += len(request.blocks)
        served_at.update(dict.fromkeys(request.blocks, host))
        return host

    return choose


def found(requests: Sequence[Request], router: Router, hosts: int, room: int) -> dict[str, float]:
    """Return what is found at most so far down, as shares of all accesses.

    *room*: blocks of one host's pool.
    """
    pools: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(hosts)]
    stored: set[int] = set()
    own = peers = ever = asked = 0
    for request in requests:
        blocks, pool = request.blocks, pools[router(request)]
        asked += len(blocks)
        own += sum(1 for _ in takewhile(pool.__contains__, blocks))
        peers += sum(1 for _ in takewhile(lambda block: any(block in one for one in pools), blocks))
        ever += sum(1 for _ in takewhile(stored.__contains__, blocks))
        stored.update(blocks)
        for block in blocks:
            pool[block] = None
            pool.move_to_end(block)
        while len(pool) > room:
            pool.popitem(last=False)
    parts = {"own": own, "and_peers": peers, "and_ever_stored": ever}
    return {name: round(part / asked, 4) for name, part in parts.items()}


def measure(requests: Sequence[Request], hosts: int) -> dict[str, Any]:
    """Return the shares by size and router."""
    blocks = footprint(requests)
    return {
        f"{share} %": {
            name: found(requests, make(hosts), hosts, blocks * share // 100 // hosts)
            for name, make in (("by_turns", by_turns), ("by_prefix", by_prefix))
        }
        for share in SHARES
    }


if __name__ == "__main__":
    hosts_asked = int(sys.argv[1]) if len(sys.argv) > 1 else HOSTS
    print(json.dumps(measure(read_trace(str(TRACE), None), hosts_asked), indent=2))
