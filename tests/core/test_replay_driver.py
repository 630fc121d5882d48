"""The clients of a replay on plain directories: what they count, and what ends them."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.bench.replay.run import Driver
from kvfs.bench.replay.trace import Request
from kvfs.core.errors import BenchFailed, VerifyFailed

BLOCK_BYTES = 64 << 10
CHAINS = [Request(0, 2048, (1, 2, 3, 4)), Request(0, 1024, (1, 2)), Request(0, 1536, (1, 9, 3))]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for three blocks."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=196k", "none", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_a_hit_is_a_block_of_a_prefix_that_was_there(tmp_path: Path) -> None:
    with Driver(str(tmp_path), BLOCK_BYTES) as driver:
        driver.run(CHAINS)
    tally = driver.tally
    # The third prompt finds block 1, stores 9, and finds 3 behind it.
    assert (tally.asked, tally.hits, tally.present) == (9, 3, 1)
    assert (tally.stored, tally.refused, tally.lost) == (5, 0, 0)
    assert tally.hit_rate == 3 / 9
    assert [(each.tokens, each.hits) for each in tally.prompts] == [(2048, 0), (1024, 2), (1536, 1)]
    assert len(tally.loads_ns) == 3
    assert len(tally.stores_ns) == 5
    assert tally.clients_cpu_ns > 0
    assert all(path.stat().st_size == BLOCK_BYTES for path in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 5


def test_several_clients_serve_every_prompt(tmp_path: Path) -> None:
    requests = [Request(0, 512, (number, 100 + number)) for number in range(40)]
    with Driver(str(tmp_path), BLOCK_BYTES, clients=3, flags=os.O_DIRECT) as driver:
        driver.run(requests)
        driver.run(requests)
    assert (driver.tally.asked, driver.tally.hits, driver.tally.stored) == (160, 80, 80)


def test_a_store_without_space_is_refused_and_the_replay_goes_on(small: Path) -> None:
    with Driver(str(small), BLOCK_BYTES) as driver:
        driver.run(CHAINS)
    assert (driver.tally.stored, driver.tally.refused, driver.tally.hits) == (3, 2, 3)
    assert not [name for name in os.listdir(small) if name.endswith(".tmp")]


@pytest.mark.parametrize("damage", ["a byte", "cut", "longer"])
def test_a_wrong_byte_ends_the_replay(tmp_path: Path, damage: str) -> None:
    with Driver(str(tmp_path), BLOCK_BYTES) as driver:
        driver.run(CHAINS[:1])
        for path in tmp_path.iterdir():
            with open(path, "r+b") as file:
                if damage == "a byte":
                    byte = os.pread(file.fileno(), 1, 40_000)[0]
                    os.pwrite(file.fileno(), bytes([byte ^ 1]), 40_000)
                else:
                    file.truncate(BLOCK_BYTES + (1 if damage == "longer" else -1))
        offset = {"a byte": 40_000, "cut": BLOCK_BYTES - 1, "longer": BLOCK_BYTES}[damage]
        with pytest.raises(VerifyFailed, match=f"not what was stored at offset {offset}"):
            driver.run(CHAINS[1:2])


def test_another_error_ends_it_too(tmp_path: Path) -> None:
    with (
        Driver(str(tmp_path / "missing"), BLOCK_BYTES) as driver,
        pytest.raises(BenchFailed, match="ENOENT"),
    ):
        driver.run(CHAINS)


def test_a_speed_keeps_the_times_of_the_trace(tmp_path: Path) -> None:
    requests = [Request(10, 512, (1,)), Request(12, 512, (2,))]
    seen: list[Request] = []
    begun_s = time.monotonic()
    with Driver(str(tmp_path), BLOCK_BYTES) as driver:
        driver.run(requests, speed=10, before_each=seen.append)
    assert time.monotonic() - begun_s >= 0.2
    assert seen == requests
