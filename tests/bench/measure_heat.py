"""Measure the heat: ``python -m tests.bench.measure_heat [BLOCKS]``; JSON on standard output.

A million blocks unless told otherwise, touched at random, then victims chosen in a thread while
this one goes on touching, as the loop does. Times in microseconds or milliseconds, memory in MB.
Not collected by pytest.
"""

import itertools
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from kvfs.eviction import Columns, Rank, policy_named
from kvfs.heat import Heat
from kvfs.syscalls import Syscalls
from kvfs.types import FIRST_INODE, InodeNo

_BLOCK_BYTES: Final = 4 << 20
_VICTIMS: Final = 1000
_SCANS: Final = 9


def rss_anon_mb() -> float:
    """Return this process's anonymous memory (proc(5), RssAnon)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith("RssAnon"))
    return int(kilobytes) * 1024 / 1e6


def _mean_us(call: Callable[[int], object], over: Iterable[int]) -> float:
    arguments = list(over)
    start = time.perf_counter()
    for argument in arguments:
        call(argument)
    return (time.perf_counter() - start) / len(arguments) * 1e6


def _scan(columns: Columns, policy: str) -> float:
    """Return how long it took to choose, in ms, best of several."""
    taken_s = []
    chooser = policy_named(policy)
    for _ in range(_SCANS):
        start = time.perf_counter()
        victims = chooser.victims(
            columns, bytes_wanted=_VICTIMS * _BLOCK_BYTES, count_max=2 * _VICTIMS
        )
        taken_s.append(time.perf_counter() - start)
        assert len(victims) == _VICTIMS
    taken_s.sort()
    return taken_s[_SCANS // 2] * 1e3


def _beside(heat: Heat, inos: list[int]) -> dict[str, float]:
    """Return what a scan in a thread costs, and what it does to touches meanwhile."""
    done = threading.Event()
    taken_ms: list[float] = []

    def choose() -> None:
        taken_ms.append(_scan(heat.columns(), heat.policy.name))
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
        "victims_ms": taken_ms[0],
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
            pool_fd,
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
        worst_us = 0.0

        def note(ino: int) -> None:
            nonlocal worst_us
            start = time.perf_counter()
            heat.note(InodeNo(ino), _BLOCK_BYTES, Rank.PUBLISHED, ino * 2654435761 & 0xFFFFFFFF)
            worst_us = max(worst_us, (time.perf_counter() - start) * 1e6)

        note_us = _mean_us(note, range(first, first + blocks))
        figures: dict[str, object] = {"blocks": blocks, "note_us": note_us, "note_max_us": worst_us}
        figures["rss_anon_mb"] = rss_anon_mb() - before_mb
        spread = random.Random(1).sample(range(first, first + blocks), min(blocks, 200_000))
        for number in range(40):  # some age, and a third of them used again
            heat.tick(float(number))
            part = spread[number::40]
            figures["touch_us"] = _mean_us(lambda ino: heat.touch(InodeNo(ino)), part)
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


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as where:
        count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
        print(json.dumps(measure_heat(count, where), indent=2))
