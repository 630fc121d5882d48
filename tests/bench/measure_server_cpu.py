"""The server's CPU per store and per open and close, held against an earlier commit: a budget.

Run as root: ``python -m tests.bench.measure_server_cpu OLD [ROUNDS] [BOUND]``. OLD is a checkout
of the earlier commit with a ``.venv``; the new one is this tree. Each serves a pool on a loop
device of its own in memory. Rounds are short and take turns; a ratio is formed within its round.
The figures are JSON; the exit status is 0 when no job takes more than BOUND of the old CPU, 1
when one does, 2 when more rounds have to tell.
"""

import json
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvfs.bench.daemon import Daemon
from kvfs.bench.jobs import Spread, spread
from kvfs.bench.self_made import torn_down
from kvfs.bench.sides import JobSide
from tests.bench.measure_commits import both_sides

DEVICE_BYTES: Final = 1 << 30
ROUNDS: Final = 60
#: More than this of the old commit's CPU, and the change has to say what for.
BOUND: Final = 1.05
#: They warm up, and do not count.
_FIRST_ROUNDS: Final = 4
STORES: Final = 40
OPENS: Final = 400
_NS_PER_US: Final = 1000
_WORSE: Final = ("within", "unsure", "over")


class Server(NamedTuple):
    """One commit's server, with the folder that its rounds are made in."""

    daemon: Daemon
    place: Path


def stores(place: Path, data: mmap.mmap) -> int:
    """Store blocks of *data* as connectors do, past the page cache."""
    for number in range(STORES):
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT
        fd = os.open(f"{place}/{number}.tmp", flags, 0o600)
        assert os.write(fd, data) == len(data)
        os.close(fd)
        os.rename(f"{place}/{number}.tmp", f"{place}/{number}")
    return STORES


def opens(place: Path, data: mmap.mmap) -> int:
    """Open and close one warm block again and again."""
    path = f"{place}/block"
    with open(path, "wb", buffering=0) as file:
        file.write(data)
    for _ in range(OPENS):
        os.close(os.open(path, os.O_RDONLY))
    return OPENS


JOBS: Final[dict[str, tuple[Callable[[Path, mmap.mmap], int], int]]] = {
    "store-4k": (stores, 4 << 10),
    "store-64k": (stores, 64 << 10),
    "store-256k": (stores, 256 << 10),
    "store-1m": (stores, 1 << 20),
    "store-4m": (stores, 4 << 20),
    "open-close": (opens, 4 << 10),
}


def cpu_us(server: Server, work: Callable[[Path, mmap.mmap], int], data: mmap.mmap) -> float:
    """Run one round in a fresh folder; return the server's CPU per operation, its rest included."""
    place = server.place / "round"
    place.mkdir()
    server.daemon.settle()
    before_ns = server.daemon.cpu_ns()
    count = work(place, data)
    server.daemon.settle()
    spent_ns = server.daemon.cpu_ns() - before_ns
    for path in place.iterdir():
        path.unlink()
    place.rmdir()
    server.daemon.settle()
    return spent_ns / count / _NS_PER_US


def compare(old: Server, new: Server, job: str, rounds: int, bound: float) -> dict[str, Any]:
    """Run *rounds* of *job* on both, in turns; return medians, the ratio and a verdict."""
    work, size_bytes = JOBS[job]
    spent: dict[str, list[float]] = {"old": [], "new": []}
    sides = [("old", old), ("new", new)]
    with mmap.mmap(-1, size_bytes) as data:
        for turn in range(_FIRST_ROUNDS + rounds):
            for name, server in sides if turn % 2 else reversed(sides):
                took_us = cpu_us(server, work, data)
                if turn >= _FIRST_ROUNDS:
                    spent[name].append(took_us)
    ratio = spread([b / a for a, b in zip(spent["old"], spent["new"], strict=True)])
    return {
        "job": job,
        "old_us": round(spread(spent["old"]).median, 1),
        "new_us": round(spread(spent["new"]).median, 1),
        "ratio": round(ratio.median, 3),
        "ratio_quartiles": [round(ratio.lower_quarter, 3), round(ratio.upper_quarter, 3)],
        "bound": bound,
        "verdict": verdict(ratio, bound),
    }


def verdict(ratio: Spread, bound: float) -> str:
    """Say what *ratio* tells: beside others' load, quartiles on both sides of 1 tell nothing."""
    if ratio.median <= bound:
        return "within"
    return "over" if ratio.lower_quarter > 1 else "unsure"


def measure(old: Path, rounds: int, bound: float) -> dict[str, Any]:
    """Serve a pool by each commit and run all jobs."""
    done = []
    with torn_down() as stack:
        before, after = (served(*side) for side in both_sides(stack, old))
        for job in JOBS:
            done.append(compare(before, after, job, rounds, bound))
            print(json.dumps(done[-1]), file=sys.stderr)
    return {
        "rounds": rounds,
        "jobs": done,
        "verdict": max((row["verdict"] for row in done), key=_WORSE.index),
    }


def served(side: JobSide, mountpoint: Path) -> Server:
    """Return what is measured of *side*."""
    assert side.daemon is not None
    return Server(side.daemon, mountpoint)


def main() -> int:
    """Measure and print."""
    old, *more = sys.argv[1:]
    rounds = int(more[0]) if more else ROUNDS
    bound = float(more[1]) if more[1:] else BOUND
    figures = measure(Path(old).resolve(), rounds, bound)
    print(json.dumps(figures, indent=1))
    return {"within": 0, "over": 1, "unsure": 2}[figures["verdict"]]


if __name__ == "__main__":
    sys.exit(main())
