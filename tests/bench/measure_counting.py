"""What counting costs: CPU of a store and of a warm open and close, against an earlier commit.

``python -m tests.bench.measure_counting OLD [ROUNDS]``; OLD is a checkout of the earlier commit.
Without a mount and its system calls, whose time differs by more than what is measured: the engine
stores in a directory in memory, and the shared handles of the mount open and close one block. A
process for each commit and round, in turns; a difference is formed within its round. Prints JSON:
CPU in us, the median of the rounds, and quartiles of the differences. Not collected by pytest.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from tests.bench.measure_commits import NEW

ROUNDS: Final = 15
#: Counts nothing where there is nothing that counts (``pool.cache``).
PROGRAM: Final = """
import gc, json, os, sys, tempfile, time
from pathlib import Path
from kvfs.core.types import ROOT_INODE
from kvfs.pool import pool
from mount.files.handles import HandleKind, Handles
from mount.files.open_shares import OpenShares
from mount.files.shared_handles import SharedHandles
from mount.fuse.grant import Grant
from tests.support.stores import Host

STORES, OPENS, TICK = 3000, 60000, 50
gc.disable()

def store(engine, number):
    looks = getattr(getattr(engine.pool, "cache", None), "looks", None)
    draft, name = b"%d.tmp" % number, b"%d.data" % number
    if looks is not None:
        looks.add(ROOT_INODE, draft)
    opened, _ = engine.blocks.create(ROOT_INODE, draft, 0o100644, 0, 0)
    engine.blocks.close(opened, writer=True)
    if looks is not None:
        looks.add(ROOT_INODE, name)
    engine.rename(ROOT_INODE, draft, ROOT_INODE, name, replace=True)

def cpu_us(work, count, engine):
    took = 0
    for number in range(count):
        begun = time.thread_time_ns()
        work(number)
        if number % TICK == 0:
            engine.tick()
        took += time.thread_time_ns() - begun
    return took / count / 1000

def batched_us(work, count, engine):
    begun = time.thread_time_ns()
    for number in range(count):
        work(number)
        if number % (TICK * 20) == 0:
            engine.tick()
    return (time.thread_time_ns() - begun) / count / 1000

with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
    host = Host(Path(place), capacity_bytes=1 << 30)
    engine = host.start().engine
    stores_us = cpu_us(lambda number: store(engine, number), STORES, engine)
    handles = Handles(os.memfd_create("handles"), OpenShares(0.5))
    readers = SharedHandles(engine.pool, handles, 64)
    ino = engine.namespace.lookup(ROOT_INODE, b"1.data")
    handle = handles.open(HandleKind.READER, 0, engine.blocks.open_to_read(ino), 0)
    readers.share(handle, Grant(0, 0))
    def load(_):
        readers.enter(ino, 0)
        readers.leave(ino, handle.fh)
    opens_us = batched_us(load, OPENS, engine)
    print(json.dumps({"store": stores_us, "open-close": opens_us}))
"""


def measured(tree: Path) -> dict[str, float]:
    """Return the CPU (us) of each job in the commit at *tree*."""
    command = [NEW / ".venv/bin/python", "-c", PROGRAM]
    done = subprocess.run(command, cwd=tree, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> int:
    """Measure in turns, and print."""
    old = Path(sys.argv[1]).resolve()
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else ROUNDS
    pairs = [(measured(old), measured(NEW)) for _ in range(rounds)]
    figures: dict[str, Any] = {"rounds": rounds}
    for job in pairs[0][0]:
        differences = [new[job] - before[job] for before, new in pairs]
        figures[job] = {
            "old_us": round(statistics.median(before[job] for before, _ in pairs), 2),
            "new_us": round(statistics.median(new[job] for _, new in pairs), 2),
            "more_us": round(statistics.median(differences), 2),
            "more_us_quartiles": [round(at, 2) for at in statistics.quantiles(differences, n=4)],
        }
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
