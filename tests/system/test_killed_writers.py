"""Writers killed by SIGKILL at random moments of a store: every visible name is whole, or gone.

A round starts a few writers, one for each way to store, kills each at a moment drawn at random,
and looks at what is there. The normal run kills 40 writers, ``make proof`` 1,000.
"""

import collections
import json
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.fuse.conftest import require_passthrough
from tests.support.clients.stamped import seed_of, state
from tests.support.clients.stepping import Stepping, until
from tests.support.kernel.calls import read_file
from tests.support.kills.stores_to_kill import BLOCKS, SIZE, WORDS, Doing, doing
from tests.support.mounts.modes import in_memory
from tests.support.mounts.mounting import Mounted, skip_without_mounts, workplace

pytestmark = pytest.mark.needs_fuse

WAYS: Final = [f"{a}-{b}" for a in ("buffered", "direct") for b in ("place", "rename")]
#: Of the kills, so many must fall inside a write: else this proves little.
INSIDE_SHARE_MIN: Final = 0.2
#: On a busy machine fewer do, and it takes more kills: at most so many times as many.
KILLS_MOST: Final = 5
#: The kernel closes what a dead process had open, and the server reads it, within this.
SETTLE_WAIT_S: Final = 20.0
#: A block is stored in some 5 to 10 ms; the kill falls so long after the beginning of one.
KILL_WITHIN_S: Final = 0.008
OPEN_STATES: Final = ("draft", "torn", "rewrite", "slab_draft")


#: Of blocks that are in memory first a quarter as many writers are killed.
IN_MEMORY_BYTES: Final = 16 * SIZE
IN_MEMORY_PART: Final = 4


@pytest.fixture(
    scope="module", params=["daemon", "passthrough", "daemon-memory", "passthrough-memory"]
)
def mounted(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A small pool of its own on each data path, with room in memory and without."""
    skip_without_mounts()
    path, _, has_memory = request.param.partition("-")
    flags = in_memory(IN_MEMORY_BYTES) if has_memory else ()
    with workplace("disk") as directory, workplace() as source:
        (source / "pool").mkdir()
        with Mounted(source / "pool", directory / "kv", f"--data-path={path}", *flags) as mount:
            if path == "passthrough":
                require_passthrough(mount)
            yield mount
            mount.stop()
            assert mount.errors() == []


def open_names(directory: Path) -> list[str]:
    """Return the names that somebody still writes, as far as the server knows."""
    names = []
    for name in os.listdir(directory):
        try:
            if state(directory / name) in OPEN_STATES:
                names.append(name)
        except FileNotFoundError:
            continue
    return names


def wait_for_block(progress: Path, block: int) -> None:
    """Wait until the writer has begun with its block number *block*."""
    until(lambda: doing(progress)[0] >= block, f"block {block} is stored", pause_s=0.0002)


class Tally:
    """What the kills hit and what they left."""

    def __init__(self) -> None:
        self.kills = 0
        self.inside: collections.Counter[str] = collections.Counter()
        self.moments: collections.Counter[str] = collections.Counter()
        self.whole = 0
        self.wrong: list[str] = []

    def look(self, directory: Path, names: set[str]) -> None:
        """Check every visible name of *names* (all but temporary ones) byte by byte."""
        for name in sorted(names):
            if name.endswith(".tmp") and state(directory / name) not in ("leased", "orphan"):
                self.wrong.append(f"{name}: {state(directory / name)}")
            try:
                seed_of(read_file(directory / name), name.removesuffix(".tmp"), SIZE)
            except AssertionError as error:
                self.wrong.append(str(error))
            else:
                self.whole += 1

    def report(self, path: str) -> dict[str, object]:
        """Return the figures, JSON-ready."""
        return {
            "data_path": path,
            "kills": self.kills,
            "inside_a_write": self.inside.total(),
            "inside_by_way": dict(self.inside),
            "moments": dict(self.moments),
            "visible_and_whole": self.whole,
            "short_or_mixed": len(self.wrong),
        }


def kill_some(mount: Mounted, tally: Tally, place: Path, chance: random.Random) -> None:
    """Run one writer of each way and kill each at a moment of its own."""
    pause = threading.Event()
    for way in WAYS:
        prefix = f"{way}-{tally.kills}"
        progress = place / prefix
        progress.write_bytes(bytes(WORDS.size))
        with Stepping(
            "tests.support.kills.stores_to_kill", mount.path, prefix, way, progress
        ) as writer:
            assert writer.at() == "ready"
            writer.to("storing")
            block = chance.randrange(BLOCKS)
            wait_for_block(progress, block)
            pause.wait(chance.uniform(0, KILL_WITHIN_S))
            writer.kill()
        number, what = doing(progress)
        tally.kills += 1
        tally.moments[what.name.lower()] += 1
        tally.inside[way] += what is Doing.WRITING
        until(lambda: not open_names(mount.path), "nobody writes any more", SETTLE_WAIT_S)
        names = {name for name in os.listdir(mount.path) if name.startswith(prefix)}
        final = f"{prefix}-{number}"
        if what is Doing.ACKNOWLEDGED and final not in names:
            tally.wrong.append(f"{final}: acknowledged and gone")
        for before in range(number):
            if f"{prefix}-{before}" not in names:
                tally.wrong.append(f"{prefix}-{before}: acknowledged before and gone")
        tally.look(mount.path, names)
        for name in names:
            os.unlink(mount.path / name)


def kill_writers(mount: Mounted, kills: int, seed: int) -> None:
    """Kill at least *kills* writers and hold what is left against the promise."""
    chance, tally = random.Random(seed), Tally()
    if mount.status()["eviction"]["policy"] == "gate":
        kills //= IN_MEMORY_PART
    enough, most = INSIDE_SHARE_MIN * kills, KILLS_MOST * kills
    with workplace() as place:
        while tally.kills < kills or (enough > tally.inside.total() and tally.kills < most):
            kill_some(mount, tally, place, chance)
    status = mount.status()
    report = tally.report(status["data_path"])
    print(json.dumps({**report, "probation": status["probation"]}))
    assert tally.wrong == []
    assert tally.inside.total() >= enough, report


def test_twenty_killed_writers(mounted: Mounted) -> None:
    """[life-torn] Five of each way: buffered or O_DIRECT, in place or by rename."""
    kill_writers(mounted, 20, seed=1)


@pytest.mark.proof
def test_a_thousand_killed_writers(mounted: Mounted) -> None:
    """[life-torn] 250 of each way, on each data path."""
    kill_writers(mounted, 1000, seed=2)
