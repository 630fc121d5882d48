"""What the gate costs: ``python -m tests.bench.measure_gate [BLOCKS]`` prints JSON.

Bursts of stores, and four times as many loads, of a pool of a million blocks that is full: 1,000
blocks stored and 4,000 loaded a second. Shown are the CPU time of one block, the share of a core
that so many take, and the memory.
"""

import json
import random
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Final

from kvfs.core.admission import GatedLru

_STORES_S: Final = 1000
_LOADS_S: Final = 4000
#: Blocks of a prompt, as on the recorded trace.
_BURST: Final = 24
_BURSTS: Final = 4000


def main() -> None:
    """Measure, and print it."""
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    draw = random.Random(1)
    tracemalloc.start()
    gate = GatedLru(blocks)
    arrays_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    held, fresh = [2] * _BURST, [0] * _BURST
    stores = [[draw.getrandbits(32) for _ in range(_BURST)] for _ in range(_BURSTS)]
    loads = [[draw.getrandbits(32) for _ in range(_BURST)] for _ in range(_BURSTS)]
    store_us = _each_us(lambda at: gate.judge(stores[at], fresh))
    evict_us = _each_us(lambda at: _evict(gate, loads[at]))
    load_us = _each_us(lambda at: gate.judge(loads[at], held))
    core = (_STORES_S * (store_us + evict_us) + _LOADS_S * load_us) / 1e6
    print(
        json.dumps(
            {
                "blocks": blocks,
                "store_us": round(store_us, 2),
                "evict_us": round(evict_us, 2),
                "load_us": round(load_us, 2),
                "share_of_a_core": round(core, 4),
                "bytes_a_block": round(arrays_bytes / blocks, 2),
                "told_bytes": gate.size_bytes,
            },
            indent=1,
        )
    )


def _evict(gate: GatedLru, names: list[int]) -> None:
    for name in names:
        gate.evicted(name, 1, touches=1)


def _each_us(call: Callable[[int], object]) -> float:
    """Return the CPU time of one block of a burst, in microseconds."""
    begun_s = time.process_time()
    for at in range(_BURSTS):
        call(at)
    return (time.process_time() - begun_s) / (_BURSTS * _BURST) * 1e6


if __name__ == "__main__":
    main()
