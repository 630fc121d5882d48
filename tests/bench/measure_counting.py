"""What counting costs: CPU of a store with the cache's figures, and with nothing that counts.

``python -m tests.bench.measure_counting [ROUNDS]``. Two commits, or two mounts, differ by more than
what is measured. So one engine in memory stores a few blocks with its figures and as many without,
in turns, and a difference is formed within its round; so it is with opens and closes of one block,
by the shared handles of the mount. Prints JSON: CPU in us, the medians, and quartiles of the
differences. Not collected by pytest.
"""

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

from kvfs.core.account import Accounts
from kvfs.core.types import ROOT_INODE, BackingId
from kvfs.pool.figures.cache_figures import CacheFigures
from kvfs.pool.pool_change import Followers
from mount.files.handles import HandleKind, Handles, OpenShares
from mount.files.shared_handles import SharedHandles
from mount.fuse.wire import Grant
from tests.support.store.stores import Host

ROUNDS: Final = 400
STORES: Final = 25
OPENS: Final = 2000
NO_BACKING: Final = BackingId(0)
NO_REQUEST: Final = 0


class Uncounted:
    """Stands for the figures, and counts nothing."""

    def __getattr__(self, _name: str) -> "Uncounted":
        return self

    def __call__(self, *_: object, **__: object) -> None:
        """Count nothing."""


def cpu_us(work: Callable[[], object], count: int) -> float:
    """Return the CPU time (us) of one of *count* calls."""
    begun_ns = time.thread_time_ns()
    for _ in range(count):
        work()
    return (time.thread_time_ns() - begun_ns) / count / 1000


def in_turns(one: Callable[[], float], other: Callable[[], float], rounds: int) -> dict[str, Any]:
    """Return what *one* takes more than *other*, of so many rounds."""
    pairs = []
    for number in range(rounds):
        first, second = (one, other) if number % 2 else (other, one)
        took = first(), second()
        pairs.append(took if number % 2 else took[::-1])
    more = [with_us - without_us for with_us, without_us in pairs]
    return {
        "with_us": round(statistics.median(pair[0] for pair in pairs), 2),
        "without_us": round(statistics.median(pair[1] for pair in pairs), 2),
        "more_us": round(statistics.median(more), 2),
        "more_us_quartiles": [round(at, 2) for at in statistics.quantiles(more, n=4)],
    }


def measured(place: Path, rounds: int) -> dict[str, Any]:
    """Return the figures of a store, and of an open with its close."""
    engine = Host(place, capacity_bytes=1 << 30).start().engine
    figures, numbers = engine.pool.figures, iter(range(sys.maxsize))
    followers, uncounted = engine.pool.followers, Followers()
    counting = {id(figures), id(figures.held)}
    uncounted._of = tuple(
        tuple(follow for follow in of if id(getattr(follow, "__self__", None)) not in counting)
        for of in followers._of
    )

    def store() -> None:
        """By a temporary name; what the kernel looks for first is counted by the mount."""
        looks, number = engine.pool.figures.looks, next(numbers)
        draft, name = b"%d.tmp" % number, b"%d.data" % number
        looks.add(ROOT_INODE, draft)
        opened, _ = engine.blocks.create(ROOT_INODE, draft, 0o100644, 0, 0)
        engine.blocks.close(opened, writer=True)
        looks.add(ROOT_INODE, name)
        engine.blocks.renames.rename(ROOT_INODE, draft, ROOT_INODE, name, replace=True)

    def stores(cache: CacheFigures, told: Followers) -> float:
        engine.pool.figures, engine.pool.followers = cache, told
        try:
            return cpu_us(store, STORES)
        finally:
            engine.pool.figures, engine.pool.followers = figures, followers
            engine.run_due()

    counted = in_turns(
        lambda: stores(figures, followers),
        lambda: stores(cast("CacheFigures", Uncounted()), uncounted),
        rounds,
    )
    handles = Handles(os.memfd_create("handles"), OpenShares(Accounts().open_files, 0.5))
    readers = SharedHandles(engine.pool, handles, 64, engine.blocks.served, engine.namespace.proofs)
    ino = engine.namespace.lookup(ROOT_INODE, b"1.data")
    handle = handles.open(HandleKind.READER, 0, engine.blocks.open_to_read(ino), NO_BACKING)
    readers.share(handle, Grant(0, NO_BACKING), 0, 0)

    def load() -> None:
        readers.enter(ino, 0, NO_REQUEST, 0, 0)
        readers.leave(ino, handle.fh, NO_REQUEST)

    return {"store": counted, "open-close": {"with_us": round(cpu_us(load, OPENS), 2)}}


def main() -> int:
    """Measure, and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    gc.disable()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        print(json.dumps({"rounds": rounds, **measured(Path(place), rounds)}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
