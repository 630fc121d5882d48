"""Runs corruptions.py in processes that may die, and says what came of each corruption."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

from tests.support.mounts.mounting import ROOT

#: A start of the process costs as much as fifty corruptions.
_BATCH: Final = 250
#: One that takes longer hangs.
_BATCH_WAIT_S: Final = 240.0
#: How a corruption can end; those behind the bar must not be.
GOOD: Final = ("right", "miss", "refused")
BAD: Final = ("wrong", "unexpected error", "refused in several lines", "dead", "hangs")


class Case(NamedTuple):
    """What was corrupted, and what came of it."""

    what: dict[str, Any]
    came: dict[str, Any]

    @property
    def end(self) -> str:
        """Return one of GOOD or BAD."""
        came = str(self.came["came"])
        if came in GOOD and (self.came.get("unexpected") or self._repair_failed):
            return "unexpected error"
        return came

    @property
    def _repair_failed(self) -> bool:
        return self.came.get("repair", "right") in ("wrong", "unexpected error")


def run_cases(seed: int, count: int, processes: int) -> list[Case]:
    """Try corruptions 0 to *count* of *seed*."""
    starts = range(0, count, _BATCH)
    with ThreadPoolExecutor(processes) as pool:
        batches = pool.map(lambda at: list(_batch(seed, at, min(at + _BATCH, count))), starts)
        return [case for batch in batches for case in batch]


def _batch(seed: int, first: int, end: int) -> Iterator[Case]:
    while first < end:
        arguments = [str(seed), str(first), str(end - first)]
        output, ended, died = _run(
            [sys.executable, "-m", "tests.support.devices.corruptions", *arguments]
        )
        lines = [json.loads(line) for line in output.splitlines()]
        whole = len(lines) // 2 * 2
        for at in range(0, whole, 2):
            yield Case(lines[at], lines[at + 1])
        first += whole // 2
        if first < end:
            assert len(lines) > whole, f"it died before a corruption: {ended}"
            yield Case(lines[-1], {"came": died, "said": ended})
            first += 1


def _run(command: list[str]) -> tuple[str, str, str]:
    """Return what *command* printed, how it ended, and what that is called."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a child that reads an index may hang, and goes with it
    )
    died = "dead"
    try:
        output, complaint = process.communicate(timeout=_BATCH_WAIT_S)
    except subprocess.TimeoutExpired:
        died = "hangs"
        os.killpg(process.pid, signal.SIGKILL)
        output, complaint = process.communicate()
    return output, f"{process.returncode}: {complaint[-300:]}", died


def table(cases: Iterable[Case]) -> str:
    """Return what came of corruptions of each kind of file, and of each way."""
    cases = list(cases)
    columns = (*GOOD, *BAD)
    rows = [f"{'':22}{'cases':>8}" + "".join(f"{name:>{len(name) + 2}}" for name in columns)]
    for key in ("target", "way", "end"):
        for value in dict.fromkeys(case.what[key] for case in cases):
            ends = Counter(case.end for case in cases if case.what[key] == value)
            counts = "".join(f"{ends[name]:>{len(name) + 2}}" for name in columns)
            rows.append(f"{value:22}{ends.total():>8}{counts}")
    return "\n".join(rows)
