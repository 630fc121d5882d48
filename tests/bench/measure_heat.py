"""Measure the heat: ``python -m tests.bench.measure_heat [BLOCKS]``; JSON on standard output.

A million blocks unless told otherwise, touched at random, then victims chosen in a thread while
this one goes on touching, as the loop does; and a store that starts on an index of as many. Times
in microseconds or milliseconds, ``cpu`` for processor time (the wall's is that of a machine with
others on it), memory in MB. Not collected by pytest.
"""

import dataclasses
import itertools
import json
import os
import random
import stat
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from kvfs.core.eviction_policy import Columns, Rank, policy_named
from kvfs.core.lifecycle import State
from kvfs.core.types import FIRST_INODE, ROOT_INODE, InodeNo, InodeRecord, Sequence
from kvfs.devices import open_source
from kvfs.engine.recovery.rebuild import skip_numbers
from kvfs.storage.heat import Heat
from kvfs.storage.index import Index
from kvfs.storage.index_place import pool_index
from kvfs.storage.run_state import write_run_state
from kvfs.storage.syscalls import Syscalls
from tests.support.mounts.mounting import MEMORY_DIRECTORY
from tests.support.store.stores import Host

_BLOCK_BYTES: Final = 4 << 20
_VICTIMS: Final = 1000
_SCANS: Final = 9


def rss_anon_mb() -> float:
    """Return this process's anonymous memory (proc(5), RssAnon)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith("RssAnon"))
    return int(kilobytes) * 1024 / 1e6


def _mean_us(call: Callable[[int], object], over: Collection[int]) -> float:
    """Return the processor time of a call, the loop's part included."""
    start_s = time.thread_time()
    for argument in over:
        call(argument)
    return (time.thread_time() - start_s) / len(over) * 1e6


def _scan(columns: Columns, policy: str) -> dict[str, float]:
    """Return how long it took to choose in this thread, the median of several."""
    wall_s, cpu_s = [], []
    chooser = policy_named(policy)
    for _ in range(_SCANS):
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        victims = chooser.victims(
            columns, bytes_wanted=_VICTIMS * _BLOCK_BYTES, count_max=2 * _VICTIMS
        )
        wall_s.append(time.perf_counter() - start_s)
        cpu_s.append(time.thread_time() - start_cpu_s)
        assert len(victims) == _VICTIMS
    return {
        "wall_ms": sorted(wall_s)[_SCANS // 2] * 1e3,
        "cpu_ms": sorted(cpu_s)[_SCANS // 2] * 1e3,
    }


def _beside(heat: Heat, inos: Collection[int]) -> dict[str, object]:
    """Return what a scan in a thread costs, and what it does to touches meanwhile."""
    done = threading.Event()
    taken: list[dict[str, float]] = []

    def choose() -> None:
        taken.append(_scan(heat.columns(), heat.policy.name))
        done.set()

    thread = threading.Thread(target=choose)
    gaps_ns = []
    before_ns = time.perf_counter_ns()
    thread.start()
    for ino in itertools.cycle(inos):
        heat.touch(InodeNo(ino))
        now_ns = time.perf_counter_ns()
        gaps_ns.append(now_ns - before_ns)
        before_ns = now_ns
        if done.is_set():
            break
    thread.join()
    gaps_ns.sort()
    return {
        "victims": taken[0],
        "touch_p50_us": gaps_ns[len(gaps_ns) // 2] / 1e3,
        "touch_p999_us": gaps_ns[len(gaps_ns) * 999 // 1000] / 1e3,
        "touch_max_ms": gaps_ns[-1] / 1e6,
    }


def measure_heat(blocks: int, directory: str) -> dict[str, object]:
    """Return the figures of a heat of so many *blocks*."""
    pool_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    syscalls = Syscalls()

    def opened(policy: str) -> Heat:
        return Heat(
            [pool_fd],
            syscalls,
            epoch=1,
            read_only=False,
            policy=policy_named(policy),
            now_s=int(time.time()),
        )

    try:
        before_mb = rss_anon_mb()
        heat = opened("lru")
        first = int(FIRST_INODE)

        def note(ino: int) -> None:
            heat.put(InodeNo(ino), _BLOCK_BYTES, Rank.PUBLISHED, ino * 2654435761 & 0xFFFFFFFF)

        figures: dict[str, object] = {"note_us": _mean_us(note, range(first, first + blocks))}
        figures["rss_anon_mb"] = rss_anon_mb() - before_mb
        draw = random.Random(1)
        spread = array("Q", draw.sample(range(first, first + blocks), min(blocks, 200_000)))
        for number in range(40):
            heat.run_due(float(number))  # each part at another time
            touch_us = _mean_us(lambda ino: heat.touch(InodeNo(ino)), spread[number::40])
        figures["touch_us"] = touch_us
        figures["scan"] = {name: _scan(heat.columns(), name) for name in ("lru", "arc")}
        figures["beside_touches"] = _beside(heat, spread[:10_000])
        figures["rss_anon_after_scans_mb"] = rss_anon_mb() - before_mb
        start = time.perf_counter()
        heat.save()
        figures["save_ms"] = (time.perf_counter() - start) * 1e3
        start = time.perf_counter()
        again = opened("arc")
        figures["open_ms"] = (time.perf_counter() - start) * 1e3
        assert len(again) == blocks
        figures["evicted_us"] = _mean_us(lambda ino: again.evicted(InodeNo(ino)), spread[:100_000])
        return figures
    finally:
        os.close(pool_fd)


def _fill(index: Index, blocks: int) -> None:
    """Enter so many published blocks, some hundred in each of many directories."""
    record = InodeRecord(
        mode=stat.S_IFREG | 0o644, uid=0, gid=0, state=State.PUBLISHED, size_bytes=_BLOCK_BYTES,
        allocated_bytes=_BLOCK_BYTES, atime_ns=1, mtime_ns=1, ctime_ns=1, btime_ns=1,
        parent=ROOT_INODE, entries=0, subdirs=0, sequence=Sequence(1), name=b"",
    )  # fmt: skip
    for start in range(0, blocks, 10_000):
        with index.write() as txn:
            for number in range(start, min(start + 10_000, blocks)):
                ino = InodeNo(FIRST_INODE + number)
                name = b"meta-llama@8B@1@0@%032x.data" % (number * 0x9E3779B97F4A7C15)
                txn.put_inode(ino, record._replace(name=name))
                txn.put_name(ROOT_INODE, name, ino)


def measure_pool(blocks: int, directory: str) -> dict[str, object]:
    """Return the figures of a start on an index of so many *blocks* whose HEAT is lost."""
    before_mb = rss_anon_mb()
    made = Host(Path(directory), capacity_bytes=blocks * _BLOCK_BYTES)
    made.settings = dataclasses.replace(
        made.settings, index_map_bytes=64 << 30, policies={"/models": {"evict": "never"}}
    )
    with open_source(directory, read_only=False) as device:
        index = Index(pool_index(device.pool_fd), preallocate_bytes=1 << 20, syscalls=Syscalls())
        with index:
            _fill(index, blocks)
        skip_numbers(InodeNo(FIRST_INODE + blocks), device.pool_fds, Syscalls())
        write_run_state(device.pool_fd, Syscalls(), clean=True, superblock=device.superblock)
    store = made.start()
    try:
        steps, start_s = 0, time.thread_time()
        while not store.scanned:
            assert store.run_one()
            steps += 1
        walk_s = time.thread_time() - start_s
        assert store.ranked_count() == blocks
        record = store.record(InodeNo(FIRST_INODE))
        return {
            "walk_s": walk_s,
            "walk_step_us": walk_s / steps * 1e6,
            "rss_anon_mb": rss_anon_mb() - before_mb,
            "renote_us": _mean_us(
                lambda ino: store.parts.rules.ranks.enter(InodeNo(ino), record),
                range(FIRST_INODE, FIRST_INODE + blocks),
            ),
        }
    finally:
        made.end()


def main() -> None:
    """Measure both and print."""
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    figures: dict[str, object] = {"blocks": blocks}
    for name, measure in (("heat", measure_heat), ("pool", measure_pool)):
        with tempfile.TemporaryDirectory(dir=MEMORY_DIRECTORY) as directory:
            figures[name] = measure(blocks, directory)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
