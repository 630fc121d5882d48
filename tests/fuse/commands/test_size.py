"""What ``kvfs size`` computes, held against a mount of that capacity."""

import json
import os
from typing import Final

import pytest

from kvfs.core.sizes import MIB
from tests.support.mounts.mounting import Mounted, run_kvfs, skip_without_mounts
from tests.support.mounts.places import blank_place

pytestmark = [pytest.mark.needs_fuse, pytest.mark.one_data_path]

#: As fast as memory: the headroom is as large as it gets.
LOAD: Final = ("--block", "1M", "--rate", "4G", "--keep", "0.1s")


def test_a_pool_of_that_capacity_holds_the_blocks_and_hardly_one_more() -> None:
    skip_without_mounts()
    needs = json.loads(run_kvfs("size", *LOAD, "--json").stdout)["needs"]
    capacity = f"--capacity={needs['capacity_bytes']}"
    with blank_place() as place, Mounted(place / "pool", place / "kv", capacity) as mount:
        block = os.urandom(MIB)

        def store(count: int, first: int) -> None:
            for number in range(first, first + count):
                (mount.path / f"{number}.tmp").write_bytes(block)
                (mount.path / f"{number}.tmp").rename(mount.path / f"{number}.data")

        store(needs["blocks"], 0)
        held = mount.status()
        assert held["blocks"] == needs["blocks"]
        assert sum(each["blocks"] for each in held["cache"]["evicted"].values()) == 0
        store(2 * needs["blocks"], needs["blocks"])
        # What a writer that is slower than stated leaves of headroom and ready files holds blocks.
        free = (needs["headroom_bytes"] + needs["ready_bytes"]) // MIB
        assert needs["blocks"] <= mount.status()["blocks"] <= needs["blocks"] + free
