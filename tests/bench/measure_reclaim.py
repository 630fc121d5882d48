"""What an eviction costs the daemon: JSON, CPU seconds a block, with and without the unlinks.

Run: ``python -m tests.bench.measure_reclaim [BLOCKS] [BYTES]``; a pool in memory, no mount.
"""

import json
import sys
import time

from kvfs.core.types import ROOT_INODE
from tests.support.store.stores import FILE, MIB, host, write

BATCH_BLOCKS = 32


def measure(blocks: int, size_bytes: int) -> dict[str, float]:
    """Store *blocks* of *size_bytes*, evict them all; return microseconds of CPU a block."""
    capacity_bytes = max(64 * MIB, 2 * blocks * size_bytes)
    with host(capacity_bytes=capacity_bytes) as made:
        store = made.start()
        for number in range(blocks):
            name = b"%d" % number
            opened, _ = store.create(ROOT_INODE, name + b".tmp", FILE, 0, 0)
            write(store, opened, b"x" * size_bytes)
            store.close(opened, writer=True)
            store.rename(ROOT_INODE, name + b".tmp", ROOT_INODE, name, replace=True)
        store.drain()
        started_s = time.process_time()
        while store.counters.blocks:
            if not store.evict(BATCH_BLOCKS * max(4096, size_bytes)):
                store.search_anew()
        evicted_s = time.process_time() - started_s
        started_s = time.process_time()
        store.unlink_now(capacity_bytes)
        unlinked_s = time.process_time() - started_s
        return {
            "blocks": blocks,
            "block_bytes": size_bytes,
            "batches": store.eviction_batches,
            "evict_us": round(evicted_s / blocks * 1e6, 1),
            "unlink_us": round(unlinked_s / blocks * 1e6, 1),
        }


def main() -> int:
    """Measure and print."""
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    sizes = [int(sys.argv[2])] if len(sys.argv) > 2 else [64 << 10, MIB]
    print(json.dumps([measure(blocks, size) for size in sizes], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
