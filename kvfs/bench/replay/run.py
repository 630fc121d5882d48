"""Runs one trace through all sides in turns, and sums up what each of them did.

Prompts go to client processes in the order of the trace, each to the first client that is free. A
hit is a block of a prefix that was there: a chain of blocks is useful up to its first missing one.
"""

import os
import select
import stat
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvfs.bench.crew import Workers, hear, tell
from kvfs.bench.killed_writers import halves_left
from kvfs.bench.replay.first_token import Model
from kvfs.bench.replay.sides import ReplaySide, Sides
from kvfs.bench.replay.trace import Request
from kvfs.machine.hardware import written_bytes as written_to

#: How many prompts a side serves before the next one has its turn: so whatever else the machine
#: does falls on all sides alike.
_TURN: Final = 200


_CLIENT = "kvfs.bench.replay.client"
#: Writers that are killed half-way when the trace is over, half of them under a temporary name.
HALF_WRITERS: Final = 4


class ReplayPlan(NamedTuple):
    """How the trace is replayed; *speed* is seconds of the trace a second, None: without waiting.

    *flags* are added to every open(2).
    """

    requests: Sequence[Request]
    block_bytes: int
    clients: int
    speed: float | None
    flags: int
    model: Model


class ServedPrompt(NamedTuple):
    """One prompt that was served, with what its time to the first token follows from.

    *waited_ns* is the time in lookups and loads before the model could begin.
    """

    tokens: int
    hits: int
    waited_ns: int


@dataclass
class ReplayCounts:
    """What happened to the blocks of all prompts so far; times of system calls in ns."""

    #: Blocks asked for.
    asked: int = 0
    #: Of these found and loaded, as part of a prefix.
    hits: int = 0
    #: Found behind the first missing block, where they help nobody.
    present: int = 0
    #: Stored, and refused for lack of space.
    stored: int = 0
    refused: int = 0
    #: Prefixes cut short because a block went between its lookup and its load.
    lost: int = 0
    loads_ns: list[int] = field(default_factory=list)
    stores_ns: list[int] = field(default_factory=list)
    prompts: list[ServedPrompt] = field(default_factory=list)
    #: CPU time of the clients in system calls, without making and checking contents.
    clients_cpu_ns: int = 0

    def add(self, request: Request, reply: dict[str, Any]) -> None:
        """Count what a client did for *request*."""
        self.asked += len(request.blocks)
        self.hits += reply["hits"]
        self.present += reply["present"]
        self.refused += reply["refused"]
        self.lost += reply["lost"]
        self.stored += len(reply["stores_ns"])
        self.loads_ns += reply["loads_ns"]
        self.stores_ns += reply["stores_ns"]
        self.clients_cpu_ns += reply["cpu_ns"]
        waited_ns = reply["lookups_ns"] + sum(reply["loads_ns"])
        self.prompts.append(ServedPrompt(request.tokens, reply["hits"], waited_ns))

    @property
    def hit_rate(self) -> float:
        """Hits of all blocks asked for, 0 to 1."""
        return self.hits / self.asked if self.asked else 0.0


class Driver(Workers):
    """Client processes that serve prompts from *directory*, with blocks of *block_bytes*.

    *flags* are added to every open(2). Leaving the ``with`` ends the clients.
    """

    def __init__(
        self, directory: str, block_bytes: int, *, clients: int = 1, flags: int = 0
    ) -> None:
        self.directory = directory
        self.tally = ReplayCounts()
        super().__init__(clients, _CLIENT, str(block_bytes), str(flags))

    def run(
        self,
        requests: Sequence[Request],
        *,
        speed: float | None = None,
        before_each: Callable[[Request], None] = lambda _: None,
    ) -> None:
        """Serve all *requests*, at *speed* seconds of the trace a second; None: without waiting.

        Raises ``VerifyFailed`` for a wrong byte, ``BenchFailed`` if a system call failed; the
        clients cannot be used after that.
        """
        free = list(self.processes)
        busy: dict[int, tuple[subprocess.Popen[bytes], Request]] = {}
        begun_s = time.monotonic()
        for request in requests:
            if speed is not None:
                due_s = begun_s + (request.at_s - requests[0].at_s) / speed
                time.sleep(max(0.0, due_s - time.monotonic()))
            if not free:
                free = self._finished(busy)
            before_each(request)
            client = free.pop()
            tell(client, {"directory": self.directory, "blocks": request.blocks})
            assert client.stdout is not None
            busy[client.stdout.fileno()] = client, request
        while busy:
            self._finished(busy)

    def _finished(
        self, busy: dict[int, tuple[subprocess.Popen[bytes], Request]]
    ) -> list[subprocess.Popen[bytes]]:
        """Wait for an answer; count each that is there, and return the clients that are free."""
        answered, _, _ = select.select(list(busy), [], [])
        free = []
        for fd in answered:
            client, request = busy.pop(fd)
            self.tally.add(request, hear(client, f"replay in {self.directory}"))
            free.append(client)
        return free


class Percentiles(NamedTuple):
    """Two percentiles and the mean of some times; 0 if there were none."""

    p50: float
    p99: float
    mean: float


class SideResult(NamedTuple):
    """What one side did; times in seconds, and CPU time of the server or the cleaner."""

    name: str
    tally: ReplayCounts
    load_s: Percentiles
    store_s: Percentiles
    first_token_s: Percentiles
    written_bytes: int | None
    server_cpu_s: float
    clients_cpu_s: float
    deleted: int | None
    elapsed_s: float
    #: What a reader finds of the blocks of HALF_WRITERS that were killed half-way.
    halves_left: int


def percentiles(values: Sequence[float]) -> Percentiles:
    """Return the median, the 99th percentile and the mean of *values*, in their unit."""
    if not values:
        return Percentiles(0.0, 0.0, 0.0)
    ordered = sorted(values)
    last = len(ordered) - 1
    return Percentiles(
        ordered[last // 2], ordered[min(last, len(ordered) * 99 // 100)], sum(values) / len(values)
    )


def written_bytes(path: str) -> int | None:
    """Return what was written so far to the block device *path*, or to the one that *path* lies on.

    The block layer counts it, discards and flushes apart. A loop device counts what its file system
    sends it. None if there is no such device or it does not count: tmpfs, overlayfs, btrfs.
    """
    try:
        found = os.stat(path)
    except OSError:
        return None
    return written_to(found.st_rdev if stat.S_ISBLK(found.st_mode) else found.st_dev)


def replay(sides: Sides, plan: ReplayPlan, served: Callable[[int], None]) -> list[SideResult]:
    """Serve the whole trace on each side; *served* gets the number of prompts just served.

    Raises ``VerifyFailed`` for a wrong byte and ``BenchFailed`` if a system call fails.
    """
    with ExitStack() as stack:
        drivers = [
            stack.enter_context(
                Driver(side.directory, plan.block_bytes, clients=plan.clients, flags=plan.flags)
            )
            for side in sides.sides
        ]
        os.sync()
        before = [written_bytes(side.device) for side in sides.sides]
        cpu_ns = [side.daemon.cpu_ns() if side.daemon else 0 for side in sides.sides]
        elapsed_s = [0.0] * len(drivers)
        for start in range(0, len(plan.requests), _TURN):
            turn = plan.requests[start : start + _TURN]
            for index, (side, driver) in enumerate(zip(sides.sides, drivers, strict=True)):
                begun_s = time.monotonic()
                _serve(side, driver, turn, plan.speed)
                elapsed_s[index] += time.monotonic() - begun_s
                served(len(turn))
        os.sync()
        return [
            _result(side, driver.tally, plan, written, spent_ns, took_s)
            for side, driver, written, spent_ns, took_s in zip(
                sides.sides, drivers, before, cpu_ns, elapsed_s, strict=True
            )
        ]


def _serve(side: ReplaySide, driver: Driver, turn: Sequence[Request], speed: float | None) -> None:
    if side.script is None:
        driver.run(turn, speed=speed)
    else:
        driver.run(turn, speed=speed, before_each=side.script.before_each)
        side.script.finish()


def _result(
    side: ReplaySide,
    tally: ReplayCounts,
    plan: ReplayPlan,
    before: int | None,
    cpu_ns: int,
    elapsed_s: float,
) -> SideResult:
    after = written_bytes(side.device)
    if side.daemon is not None:
        server_ns = side.daemon.cpu_ns() - cpu_ns
    else:
        server_ns = side.script.cpu_ns if side.script else 0
    first_token_s = [
        plan.model.first_token_s(each.tokens, each.hits, each.waited_ns / 1e9, plan.block_bytes)
        for each in tally.prompts
    ]
    return SideResult(
        name=side.name,
        tally=tally,
        load_s=percentiles([ns / 1e9 for ns in tally.loads_ns]),
        store_s=percentiles([ns / 1e9 for ns in tally.stores_ns]),
        first_token_s=percentiles(first_token_s),
        written_bytes=None if before is None or after is None else after - before,
        server_cpu_s=server_ns / 1e9,
        clients_cpu_s=tally.clients_cpu_ns / 1e9,
        deleted=side.script.deleted if side.script else None,
        elapsed_s=elapsed_s,
        halves_left=_halves_left(side.directory, plan.block_bytes),
    )


def _halves_left(directory: str, block_bytes: int) -> int:
    names = [f"{directory}/half-{n}.{'data' if n % 2 else 'tmp'}" for n in range(HALF_WRITERS)]
    return len(halves_left([Path(name) for name in names], block_bytes // 2))
