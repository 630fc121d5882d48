"""Stores and loads through NFS-Ganesha: a pool against an XFS that it exports as well, as JSON.

Run as root: ``python -m tests.bench.measure_nfs [PAIRS] [JOB...]``; JOB is a shell pattern. Both
lie on a loop device of their own in memory, the pool on the data path passthrough. Clients are
libnfs's, on NFSv3: its NFSv4 writes 3.5 KiB at a time. A ratio above 1 is: the pool is faster.
"""

import fnmatch
import json
import mmap
import os
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvfs.bench.daemon import KVFS, Daemon, mount_status
from kvfs.bench.jobs import GIGABYTE, Pair, compare, first_is_baseline, spread
from kvfs.bench.self_made import (
    check_room,
    fill_holes,
    folders,
    kvfs_mount,
    loop_device,
    run_tool,
    torn_down,
    unmount,
)
from kvfs.client.nfs.ganesha_config import FIT, FIT_EXPIRATION_S
from kvfs.core.sizes import KIB, MIB
from tests.support.clients.stepping import until
from tests.support.machines.own_network import own_network
from tests.support.nfs.client import NfsClient
from tests.support.nfs.ganesha import KEEPS_MEMORY, Export, Ganesha

DEVICE_BYTES: Final = 3 << 30
BACKING: Final = "/dev/shm"
CLIENTS: Final = 2
PAIRS: Final = 9
#: What kvfs is to reach of XFS (issue 17).
GOAL: Final = 0.9
#: So that an open of a load is one: the server closes what nobody used for a second or two.
_CLOSE_WAIT_S: Final = 30.0
#: Requests that carry a block's bytes through the daemon.
_BYTES: Final = ("READ", "WRITE")
_NS: Final = 1_000_000_000


class Job(NamedTuple):
    """What is timed: so many blocks of one size, stored or loaded by all clients together."""

    verb: str
    size_bytes: int
    blocks: int
    has_goal: bool = True

    @property
    def name(self) -> str:
        size = (
            f"{self.size_bytes // MIB}m" if self.size_bytes >= MIB else f"{self.size_bytes >> 10}k"
        )
        return f"{self.verb}-{size}"


JOBS: Final = (
    Job("store", 32 * MIB, 16),
    Job("load", 32 * MIB, 16),
    Job("store", 4 * MIB, 128),
    Job("load", 4 * MIB, 128),
    Job("store", 256 * KIB, 512, has_goal=False),
    Job("load", 256 * KIB, 512, has_goal=False),
)


class Spent(NamedTuple):
    """What Ganesha and the daemon have spent so far."""

    server_s: float
    daemon_s: float
    requests: Counter[str]


class Run(NamedTuple):
    """One run of a job on one side: its time, and what it took of CPU time and requests."""

    wall_s: float
    server_s: float
    daemon_s: float
    requests: Counter[str]


class Side:
    """One of the two exports and its clients."""

    def __init__(
        self, stack: ExitStack, server: Ganesha, path: Path, clients: list[NfsClient], served: bool
    ) -> None:
        self._server = server
        self._path = path
        self._clients = [stack.enter_context(client) for client in clients]
        self._ganesha = Daemon(server.pid)
        self.daemon = Daemon(int(mount_status(str(path))["server_pid"])) if served else None
        self._rounds = 0

    def run(self, job: Job) -> Run:
        """Run *job* once; what it needs is stored before and removed after, untimed."""
        self._rounds += 1
        each = job.blocks // CLIENTS
        names = [
            [f"/{job.name}-{self._rounds}-{client}-{block:04}" for block in range(each)]
            for client in range(CLIENTS)
        ]
        if job.verb == "load":
            self._together("store_blocks", names, job.size_bytes)
        self._settle()
        back_with(job.size_bytes * job.blocks)
        before = self._spent()
        ends = self._together(f"{job.verb}_blocks", names, job.size_bytes)
        wall_s = (max(end for _, end in ends) - min(start for start, _ in ends)) / _NS
        if self.daemon is not None:
            self.daemon.settle()
        after = self._spent()
        self._together("remove_blocks", names)
        return Run(
            wall_s,
            after.server_s - before.server_s,
            after.daemon_s - before.daemon_s,
            after.requests - before.requests,
        )

    def _together(self, call: str, names: list[list[str]], *arguments: object) -> list[Any]:
        for client, mine in zip(self._clients, names, strict=True):
            client.begin(call, mine, *arguments)
        return [client.answer() for client in self._clients]

    def _settle(self) -> None:
        """Wait until the server has closed all, and nothing of before is going on.

        XFS has written at COMMIT; the pool writes back later, and reads what it checksums.
        """
        os.sync()
        below = f"{self._path}/"
        until(
            lambda: not any(path.startswith(below) for path in self._server.open_paths()),
            f"Ganesha closes all below {self._path}",
            _CLOSE_WAIT_S,
        )
        if self.daemon is not None:
            run_tool(*KVFS, "sync", str(self._path))
            self.daemon.settle()

    def _spent(self) -> Spent:
        """Look at what both processes have spent. Asking the daemon costs it more, so once."""
        server_s = self._ganesha.cpu_ns() / _NS
        if self.daemon is None:
            return Spent(server_s, 0.0, Counter())
        requests = Counter(mount_status(str(self._path))["requests"])
        return Spent(server_s, self.daemon.cpu_ns() / _NS, requests)


def back_with(size_bytes: int) -> None:
    """Let the host back so much of the free memory of a virtual machine, and half as much more.

    The first write into memory that was given back to the host costs several times what a store
    does, and it is chance which side meets it (docs/performance.md). So each run finds enough.
    """
    with mmap.mmap(-1, size_bytes * 3 // 2) as memory:
        for page in range(0, len(memory), mmap.PAGESIZE):
            memory[page] = 1


class Sides(NamedTuple):
    """Both."""

    xfs: Side
    kvfs: Side

    @classmethod
    def made(cls, stack: ExitStack) -> "Sides":
        """Make both file systems, the server and its clients."""
        check_room(2 * DEVICE_BYTES, BACKING)
        images, _ = folders(stack, BACKING)
        network = stack.enter_context(own_network())
        places = {name: network.place / name for name in ("xfs", "kvfs")}
        devices = {}
        for name, place in places.items():
            place.mkdir()
            devices[name] = stack.enter_context(loop_device(images / name, DEVICE_BYTES))
        run_tool("mkfs.xfs", "-q", devices["xfs"])
        run_tool(*KVFS, "mkfs", devices["kvfs"])
        fill_holes(*(images / name for name in places))
        stack.callback(unmount, str(places["xfs"]))
        run_tool("mount", "-t", "xfs", devices["xfs"], str(places["xfs"]))
        stack.enter_context(kvfs_mount(devices["kvfs"], str(places["kvfs"]), "passthrough", print))
        more = f"Attr_Expiration_Time = {FIT_EXPIRATION_S};"
        exports = [Export(f"/{name}", place, more) for name, place in places.items()]
        low, interval_s = FIT
        cache = f"MDCACHE {{ FD_LWMark_Percent = {low}; LRU_Run_Interval = {interval_s}; }}"
        server = stack.enter_context(
            Ganesha(network, images, *exports, settings=cache, environment=KEEPS_MEMORY)
        )
        sides = []
        for name, place in places.items():
            program = "tests.bench.nfs_worker"
            clients = [
                NfsClient(network, 3, f"/{name}", f"{name}-{number}", program=program)
                for number in range(CLIENTS)
            ]
            sides.append(Side(stack, server, place, clients, name == "kvfs"))
        return cls(*sides)

    def run(self, job: Job, pairs: int) -> dict[str, Any]:
        """Run *job* in alternating pairs; one run of each side before does not count."""
        runs: dict[str, list[Run]] = {"xfs": [], "kvfs": []}
        sides = [("xfs", self.xfs), ("kvfs", self.kvfs)]
        for _, side in sides:
            side.run(job)
        for pair_no in range(pairs):
            for name, side in sides if first_is_baseline(pair_no) else reversed(sides):
                runs[name].append(side.run(job))
        return figures(job, runs["xfs"], runs["kvfs"])


def figures(job: Job, xfs: list[Run], kvfs: list[Run]) -> dict[str, Any]:
    """Return the medians of the rates and of the ratios within the pairs, with their quartiles."""
    amount = job.blocks * job.size_bytes / GIGABYTE
    compared = compare(
        [
            Pair(amount / one.wall_s, amount / other.wall_s)
            for one, other in zip(xfs, kvfs, strict=True)
        ]
    )
    ratio = compared.ratio
    asked = sum((run.requests for run in kvfs), Counter[str]())
    cpu_us = {
        "ganesha_us_xfs": [run.server_s for run in xfs],
        "ganesha_us_kvfs": [run.server_s for run in kvfs],
        "daemon_us": [run.daemon_s for run in kvfs],
    }
    return {
        "job": job.name,
        "xfs_gb_s": round(compared.baseline.median, 3),
        "kvfs_gb_s": round(compared.kvfs.median, 3),
        "ratio": round(ratio.median, 3),
        "ratio_quartiles": [round(ratio.lower_quarter, 3), round(ratio.upper_quarter, 3)],
        "ratio_ends": [round(ratio.low, 3), round(ratio.high, 3)],
        "goal": GOAL if job.has_goal else None,
        "met": ratio.median >= GOAL if job.has_goal else None,
        **{
            key: round(spread(spent_s).median * 1e6 / job.blocks, 1)
            for key, spent_s in cpu_us.items()
        },
        "through_the_daemon": sum(asked[name] for name in _BYTES),
        "requests_a_block": {
            name: round(count / len(kvfs) / job.blocks, 2)
            for name, count in asked.most_common()
            if count >= len(kvfs) * job.blocks // 10
        },
    }


def measure(pairs: int, patterns: list[str]) -> dict[str, Any]:
    """Run the jobs on both sides in turns."""
    done = []
    jobs = [job for job in JOBS if any(fnmatch.fnmatch(job.name, one) for one in patterns)]
    with torn_down() as stack:
        sides = Sides.made(stack)
        for job in jobs:
            done.append(sides.run(job, pairs))
            print(json.dumps(done[-1]), file=sys.stderr)
    return {"pairs": pairs, "clients": CLIENTS, "jobs": done}


def main() -> int:
    """Measure and print."""
    pairs = int(sys.argv[1]) if sys.argv[1:] else PAIRS
    print(json.dumps(measure(pairs, sys.argv[2:] or ["*"]), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
