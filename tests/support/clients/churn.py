"""A full pool under load: writers and readers as processes, and a watch on what the pool holds."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.support.mounts.mounting import ROOT, loop_device, mounted_at, workplace

_STAT_BLOCK_BYTES: Final = 512
_SAMPLE_S: Final = 0.02
_WAIT_S: Final = 300.0
#: Readers begin then: before it they would count misses that say nothing about eviction.
_NEARLY_FULL: Final = 0.85


class Load(NamedTuple):
    """What the clients do; sizes in bytes, ``stored_bytes`` over all writers."""

    capacity_bytes: int
    stored_bytes: int
    least_bytes: int
    most_bytes: int
    writers: int = 8
    readers: int = 4
    #: So many pools full of names: readers find about one over this.
    pools_of_names: float = 1.5
    pause_s: float = 0.005
    #: Whether each store has a name of its own, as blocks named by their content do, and readers
    #: draw from the ``names`` that were stored last; else all draw from the same names.
    new_names: bool = False
    #: On XFS, what its trees take meanwhile to map what it holds.
    trees_bytes: int = 0

    @property
    def names(self) -> int:
        """How many names the clients use."""
        import math

        spread = math.log(self.most_bytes / self.least_bytes)
        spread_bytes = self.most_bytes - self.least_bytes
        mean_bytes = spread_bytes / spread if spread else self.most_bytes
        return max(4, int(self.pools_of_names * self.capacity_bytes / mean_bytes))


@contextlib.contextmanager
def own_xfs(size_bytes: int) -> Iterator[Path]:
    """Yield a directory in an XFS of its own, which allocates and frees as fast as a drive's."""
    with (
        workplace("disk") as place,
        loop_device(size_bytes, format_xfs=True) as device,
        mounted_at(place / "xfs", "-t", "xfs", device) as xfs,
    ):
        (xfs / "pool").mkdir()
        yield xfs / "pool"


class Usage:
    """What the extents of a pool hold, looked at all the while in a thread.

    Told by statfs of the file system that the pool has for itself: one number, where a walk may
    count a block that goes and the one that comes for it both.
    """

    def __init__(self, pool: Path, capacity_bytes: int, trees_bytes: int = 0) -> None:
        self._pool = pool
        self._capacity_bytes = capacity_bytes
        self._frees_late = trees_bytes > 0
        #: What the file system takes for itself.
        self._own_bytes = 0
        self._own_bytes = self._held_bytes() - self._named() + trees_bytes
        self.samples: list[tuple[float, int]] = []
        #: Set when the pool was nearly full for the first time.
        self.filled = threading.Event()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def now_bytes(self) -> int:
        """Return the blocks of all extents, those without a name that somebody reads included.

        XFS gives back what was unlinked a moment later: there only what has a name is over.
        """
        held_bytes = self._held_bytes()
        if self._frees_late and held_bytes > self._capacity_bytes:
            return min(held_bytes, self._named())
        return held_bytes

    def _held_bytes(self) -> int:
        status = os.statvfs(self._pool)
        used_bytes = (status.f_blocks - status.f_bfree) * status.f_frsize
        return used_bytes - self._others_bytes() - self._own_bytes

    def _named(self) -> int:
        """Return what those extents hold that two walks found: they were there together.

        One walk alone may count a block that goes and the one that comes for it both.
        """
        before, after = self._extents(), self._extents()
        return sum(min(held, after[name]) for name, held in before.items() if name in after)

    def _extents(self) -> dict[str, int]:
        found = {}
        for directory in os.scandir(self._pool / "extents"):
            for file in os.scandir(directory.path):
                with contextlib.suppress(FileNotFoundError):
                    status = file.stat(follow_symlinks=False)
                    found[file.name] = status.st_blocks * _STAT_BLOCK_BYTES
        return found

    def _others_bytes(self) -> int:
        """Return the blocks of the pool's other files: the index's log, heat and the small ones."""
        held_bytes = 0
        for file in (*self._pool.glob("*"), *self._pool.glob("log/*")):
            with contextlib.suppress(FileNotFoundError):  # one that is renamed when it is whole
                held_bytes += file.lstat().st_blocks * _STAT_BLOCK_BYTES
        return held_bytes

    def _work(self) -> None:
        while not self._ends.wait(_SAMPLE_S):
            held_bytes = self.now_bytes()
            self.samples.append((time.monotonic(), held_bytes))
            if held_bytes > _NEARLY_FULL * self._capacity_bytes:
                self.filled.set()

    def __enter__(self) -> "Usage":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def share_above(self, bound_bytes: float) -> float:
        """Return the share of the samples above *bound_bytes*, from the first store on."""
        samples = self._stored()
        return sum(held > bound_bytes for held in samples) / max(1, len(samples))

    def share_until(self, bound_bytes: float) -> float:
        """Return the share of the samples before the first one above *bound_bytes*."""
        samples = self._stored()
        until = (at for at, held in enumerate(samples) if held > bound_bytes)
        return next(until, len(samples)) / max(1, len(samples))

    def _stored(self) -> list[int]:
        return [held for _, held in self.samples if held > self.samples[0][1]]

    @property
    def most_bytes(self) -> int:
        """The most that was ever seen."""
        return max(held for _, held in self.samples)


class Result(NamedTuple):
    """What the clients and the watch found."""

    writers: list[dict[str, Any]]
    readers: list[dict[str, Any]]
    usage: Usage
    wall_s: float

    @property
    def failed(self) -> list[dict[str, int]]:
        """Every kind of call that failed, by client."""
        return [client["failed"] for client in self.writers + self.readers if client["failed"]]

    @property
    def wrong(self) -> list[str]:
        """Every load that gave other bytes than were stored."""
        return [complaint for reader in self.readers for complaint in reader["wrong"]]

    @property
    def hit_share(self) -> float:
        """The share of loads that found their block."""
        hits = float(sum(reader["hits"] for reader in self.readers))
        misses = float(sum(reader["misses"] for reader in self.readers))
        return hits / max(1.0, hits + misses)

    def report(self, load: Load) -> dict[str, Any]:
        """Return the figures, JSON-ready."""
        stored_bytes = sum(writer["bytes"] for writer in self.writers)
        return {
            "wall_s": round(self.wall_s, 2),
            "stored_bytes": stored_bytes,
            "store_mib_s": round(stored_bytes / (1 << 20) / self.wall_s, 1),
            "p50_s": max(writer["p50_s"] or 0 for writer in self.writers),
            "p99_s": max(writer["p99_s"] or 0 for writer in self.writers),
            "loads": sum(reader["hits"] + reader["misses"] for reader in self.readers),
            "hit_share": round(self.hit_share, 3),
            "failed": self.failed,
            "wrong": self.wrong,
            "samples": len(self.usage.samples),
            "most_share": round(self.usage.most_bytes / load.capacity_bytes, 4),
            "until_90_share": round(self.usage.share_until(0.9 * load.capacity_bytes), 3),
            "above_90_share": round(self.usage.share_above(0.9 * load.capacity_bytes), 3),
        }


def churn(root: Path, pool: Path, load: Load) -> Result:
    """Run *load* on the mount at *root* of the directory pool *pool*, to the writers' end."""
    for number in range(4):
        (root / str(number)).mkdir(exist_ok=True)
    sizes = [
        f"--names={load.names}",
        f"--least-bytes={load.least_bytes}",
        f"--most-bytes={load.most_bytes}",
        f"--pause-s={load.pause_s}",
        f"--writers={load.writers}",
    ]
    each_bytes = load.stored_bytes // load.writers
    with contextlib.ExitStack() as stack:
        if load.new_names:
            sizes.append(f"--stored={stack.enter_context(workplace())}")
        usage = stack.enter_context(Usage(pool, load.capacity_bytes, load.trees_bytes))
        writers = [
            stack.enter_context(
                _client("writer", str(root), f"--seed={seed}", f"--bytes={each_bytes}", *sizes)
            )
            for seed in range(1, load.writers + 1)
        ]
        _begin_together(writers)
        started_s = time.monotonic()
        while not usage.filled.wait(_SAMPLE_S) and writers[0].poll() is None:
            pass  # they end also if they never fill it
        readers = [
            stack.enter_context(_client("reader", str(root), f"--seed={100 + seed}", *sizes))
            for seed in range(load.readers)
        ]
        stored = [_result(writer) for writer in writers]
        wall_s = time.monotonic() - started_s
        loaded = [_result(reader) for reader in readers]
    return Result(stored, loaded, usage, wall_s)


@contextlib.contextmanager
def _client(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.clients.churn_worker", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _begin_together(writers: list["subprocess.Popen[str]"]) -> None:
    """Let them go when all are ready, so that a slow start of some is no time of a full pool."""
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()


def _result(process: "subprocess.Popen[str]") -> dict[str, Any]:
    out, _ = process.communicate(timeout=_WAIT_S)
    assert process.returncode == 0, f"a client ended with {process.returncode}"
    found: dict[str, Any] = json.loads(out)
    return found
