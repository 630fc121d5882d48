"""A pool that is full all the time: writers store ten times what it holds, readers look for it.

No call fails, every byte is right, the bound holds. ``KVFS_TEST_PROOF=1`` runs the full size.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.churn import Load, Result, churn, own_tmpfs
from tests.support.mounting import Mounted, skip_without_mounts, workplace

MIB = 1 << 20
PROOF = os.environ.get("KVFS_TEST_PROOF") == "1"
FACTOR = 8 if PROOF else 1
CAPACITY_BYTES = 256 * MIB * FACTOR
#: Sizes of a thirty-second of the pool at most, as in a pool of 2 GiB.
MIXED = Load(CAPACITY_BYTES, 10 * CAPACITY_BYTES, MIB // 2, 8 * MIB * FACTOR)


@pytest.fixture(params=["daemon", "passthrough"])
def full(request: pytest.FixtureRequest) -> Iterator[tuple[Mounted, Path]]:
    """A mount of a pool in memory, on each data path."""
    skip_without_mounts()
    with workplace("disk") as place, own_tmpfs() as pool:
        flags = (f"--capacity={CAPACITY_BYTES}", f"--data-path={request.param}")
        with Mounted(pool, place / "kv", *flags) as mounted:
            yield mounted, pool
            mounted.stop()
            assert mounted.errors() == []


def assert_kept(result: Result, load: Load, mounted: Mounted) -> None:
    """Expect what a full pool promises."""
    report = result.report(load)
    shown = json.dumps({**report, "eviction": mounted.status()["eviction"]})
    print(shown)
    assert result.failed == [], shown
    assert result.wrong == [], shown
    assert report["most_share"] <= 1.0, shown
    assert report["above_90_share"] >= 0.8, shown
    assert report["hit_share"] >= 0.3, shown


def test_blocks_of_mixed_sizes(full: tuple[Mounted, Path]) -> None:
    mounted, pool = full
    result = churn(mounted.path, pool, MIXED)
    assert_kept(result, MIXED, mounted)
    status = mounted.status()
    assert status["eviction"]["blocks"] > 100
    assert status["warning"] is None
