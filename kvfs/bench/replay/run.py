"""Runs one trace through all sides in turns, and sums up what each of them did."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final, NamedTuple

from kvfs.bench.replay.device_writes import written_bytes
from kvfs.bench.replay.driver import Driver, ReplayCounts
from kvfs.bench.replay.first_token import Model
from kvfs.bench.replay.sides import ReplaySide, Sides
from kvfs.bench.replay.trace import Request

#: How many prompts a side serves before the next one has its turn: so whatever else the machine
#: does falls on all sides alike.
_TURN: Final = 200


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


def percentiles(values: Sequence[float]) -> Percentiles:
    """Return the median, the 99th percentile and the mean of *values*, in their unit."""
    if not values:
        return Percentiles(0.0, 0.0, 0.0)
    ordered = sorted(values)
    last = len(ordered) - 1
    return Percentiles(
        ordered[last // 2], ordered[min(last, len(ordered) * 99 // 100)], sum(values) / len(values)
    )


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
    )
