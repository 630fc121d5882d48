"""The figures of the cache on a recorded trace, against what clients counted and other pools did.

The long part is a proof, run by ``make proof``: the whole trace in pools of several sizes, in three
directories, on both data paths. It prints its figures as JSON. KVFS_PROOF_REQUESTS makes it
shorter.
"""

import json
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from kvfs.bench.replay.trace import Request, footprint, read_trace
from tests.fuse.conftest import require_passthrough
from tests.support.clients.cache_client import CacheClient
from tests.support.clients.stepping import until
from tests.support.kernel.message_counts import ask_status
from tests.support.mounts.mounting import (
    ROOT,
    Mounted,
    loop_device,
    run_kvfs,
    skip_without_mounts,
    workplace,
)

pytestmark = [pytest.mark.needs_fuse, pytest.mark.needs_loop]

TRACE: Final = ROOT / "tests" / "traces" / "conversation.trace.gz"
REQUESTS: Final = int(os.environ.get("KVFS_PROOF_REQUESTS", "0")) or None
#: Requests of a short test. A prompt's second block tells the conversation.
FEW: Final = 60
#: A skewed load, and a pool with room for so many of its blocks.
SKEWED_NAMES: Final = 900
SKEWED_LOADS: Final = 1800
SKEWED_ROOM: Final = 200
DIRECTORIES: Final = ("first", "second", "third")
BLOCK_BYTES: Final = 16 << 10
DEVICE_BYTES: Final = 4 << 30
#: The pool of the proof has room for this share of the trace's blocks.
SHARE: Final = 0.05
RATE_WITHIN: Final = 0.005
CURVE_WITHIN: Final = 0.03
CHANGES: Final = {"daemon": "--data-path=daemon", "passthrough": "--data-path=passthrough"}


def requests_of(count: int | None) -> list[Request]:
    """Return the first *count* requests of the trace."""
    return read_trace(str(TRACE), count)


class Served:
    """What a pool did with the trace, as its clients and as itself counted it."""

    def __init__(self, mounted: Mounted) -> None:
        self.mounted = mounted
        self.clients = []
        for name in DIRECTORIES:
            directory = mounted.path / name
            directory.mkdir()
            self.clients.append(CacheClient(directory, content=os.urandom(BLOCK_BYTES)))

    def serve(self, requests: Sequence[Request]) -> None:
        """Serve each request in one of the directories, as a connector would without a GPU.

        A request loads each block that is there, and stores the others after that.
        """
        for request in requests:
            client = self.clients[request.blocks[:2][-1] % len(self.clients)]
            names = [f"model@1@0@{block:016x}.data" for block in request.blocks]
            for name in [name for name in names if not client.load(name)]:
                client.store(name)

    @property
    def hit_rate(self) -> float:
        """Of all clients."""
        hits = sum(client.hits for client in self.clients)
        return hits / (hits + sum(client.misses for client in self.clients))

    def cache(self) -> dict[str, Any]:
        """Return the pool's figures, once its last misses count."""
        misses = sum(client.misses for client in self.clients)

        def settled() -> bool:
            status = ask_status(self.mounted)
            return status["cache"]["misses"] >= 0.99 * misses

        until(settled, "the last misses")
        found: dict[str, Any] = ask_status(self.mounted)["cache"]
        return found


def hold_against_clients(served: Served) -> dict[str, Any]:
    """The figures are those of the clients; return both."""
    cache = served.cache()
    shown = {"counted": served.hit_rate, "shown": cache["hit_rate"]}
    assert cache["hit_rate"] == pytest.approx(served.hit_rate, abs=RATE_WITHIN)
    for client in served.clients:
        name = client.directory.name
        tally = cache["directories"][name]
        shown[name] = {"counted": client.hit_rate, "shown": tally["hit_rate"]}
        assert tally["hit_rate"] == pytest.approx(client.hit_rate, abs=RATE_WITHIN)
        assert tally["hits"] == client.hits
        assert tally["loaded_bytes"] == client.loaded_bytes
        assert tally["stored_blocks"] == client.stored
    assert cache["models"]["model"]["hits"] == cache["hits"]
    return shown


def pool_of(path: str, device: str, place: Path, capacity_bytes: int) -> Mounted:
    """Return a mount of a fresh pool on *device*."""
    return Mounted(device, place / "kv", CHANGES[path], f"--capacity={capacity_bytes}")


@pytest.fixture
def place() -> Iterator[Path]:
    skip_without_mounts()
    with workplace("disk") as directory:
        yield directory


@pytest.mark.parametrize("path", CHANGES)
def test_the_hit_rate_is_what_the_clients_counted(path: str, place: Path) -> None:
    requests = requests_of(FEW)
    capacity_bytes = footprint(requests) // 4 * BLOCK_BYTES
    with loop_device(DEVICE_BYTES) as device, pool_of(path, device, place, capacity_bytes) as mount:
        if path == "passthrough":
            require_passthrough(mount)
        served = Served(mount)
        served.serve(requests)
        hold_against_clients(served)
        assert ask_status(mount)["cache"]["evicted"]["space"]["blocks"] > 100


@pytest.mark.proof
def test_the_curve_of_a_skewed_load_is_that_of_pools_of_other_sizes(place: Path) -> None:
    """A short one, whose hit rates differ much from size to size."""
    rng = random.Random(1)
    asked = [int(SKEWED_NAMES * rng.random() ** 3) for _ in range(SKEWED_LOADS)]
    requests = [Request(0.0, 512, (0, block)) for block in asked]
    rates: dict[float, float] = {}
    curve: dict[float, float] = {}
    with loop_device(DEVICE_BYTES) as device:
        for factor in (0.5, 1.0, 2.0):
            capacity_bytes = int(SKEWED_ROOM * BLOCK_BYTES * factor)
            with pool_of("daemon", device, place, capacity_bytes) as mount:
                served = Served(mount)
                served.serve(requests)
                rates[factor] = served.hit_rate
                if factor == 1:
                    points = served.cache()["curve"]
                    curve = {point["factor"]: point["hit_rate"] for point in points}
                mount.stop()
            run_kvfs("destroy", device, "--yes")
    assert rates[2.0] - rates[0.5] > 4 * CURVE_WITHIN
    for factor, rate in rates.items():
        assert curve[factor] == pytest.approx(rate, abs=CURVE_WITHIN), (curve, rates)


@pytest.mark.proof
@pytest.mark.parametrize("path", CHANGES)
def test_the_curve_is_what_pools_of_other_sizes_do(path: str, place: Path) -> None:
    requests = requests_of(REQUESTS)
    whole_bytes = int(footprint(requests) * SHARE) * BLOCK_BYTES
    figures: dict[str, Any] = {"path": path, "requests": len(requests)}
    curves: dict[float, dict[float, float]] = {}
    true_rates: dict[float, float] = {}
    with loop_device(DEVICE_BYTES) as device:
        for factor in (0.5, 1.0, 2.0):
            with pool_of(path, device, place, int(whole_bytes * factor)) as mount:
                served = Served(mount)
                served.serve(requests)
                figures[f"pool {factor:g}"] = hold_against_clients(served)
                true_rates[factor] = served.hit_rate
                curve = served.cache()["curve"]
                curves[factor] = {point["factor"]: point["hit_rate"] for point in curve}
                mount.stop()
            run_kvfs("destroy", device, "--yes")
    figures["predicted at half"] = curves[1.0][0.5]
    figures["predicted at twice"] = curves[1.0][2.0]
    print(json.dumps(figures, indent=1))
    assert curves[1.0][0.5] == pytest.approx(true_rates[0.5], abs=CURVE_WITHIN)
    assert curves[1.0][1.0] == pytest.approx(true_rates[1.0], abs=CURVE_WITHIN)
    assert curves[1.0][2.0] == pytest.approx(true_rates[2.0], abs=CURVE_WITHIN)
