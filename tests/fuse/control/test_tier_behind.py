"""What a tier behind this one would have had: lookups and stores of what was evicted here."""

from typing import Any, Final

import pytest

from tests.support.clients.cache_client import CacheClient
from tests.support.clients.stepping import until
from tests.support.kernel.message_counts import mounted_with
from tests.support.mounts.mounting import Mounted, run_kvfs

pytestmark = pytest.mark.needs_fuse

MIB: Final = 1 << 20


def behind(mount: Mounted) -> dict[str, Any]:
    """The figures of the mount."""
    found: dict[str, Any] = mount.status()["cache"]["tier_behind"]
    return found


def until_missed(mount: Mounted, count: int) -> None:
    """Wait until so many are counted: a miss counts a moment after its look."""
    until(lambda: behind(mount)["ages"]["1d"]["missed"] == count, f"{count} missed")


def client_of(mount: Mounted) -> CacheClient:
    """A client that has stored, and lost, three blocks of a MiB."""
    client = CacheClient(mount.path / "kv", content=b"x" * MIB)
    client.directory.mkdir()
    for number in range(3):
        client.store(f"block-{number}")
    run_kvfs("evict", str(client.directory))
    return client


def test_lookups_and_stores_of_what_was_evicted_count() -> None:
    with mounted_with({}) as mount:
        assert behind(mount)["ages"]["1d"]["hit_rate_gain"] is None
        client = client_of(mount)
        assert not client.load("block-0")
        assert not client.load("never-stored")
        until_missed(mount, 1)
        for number in range(3):  # the first is counted already
            client.store(f"block-{number}")
        assert client.load("block-2")
        until(lambda: mount.status()["cache"]["misses"] > 1, "never-stored counts, too")
        told = behind(mount)
        day = told["ages"]["1d"]
        # The kernel may look twice for a name that it knew: such a store is a miss.
        assert day["missed"] + day["stored_again"] == 3
        assert day["hit_rate_gain"] == pytest.approx(3 / 5, abs=1e-6)
        assert day["read_bytes"] == day["held_bytes"] == 3 * MIB
        assert told["daily_bytes"] > 3 * MIB
        assert told["names_share"] == 1
        printed = run_kvfs("status", str(mount.path)).stdout
        assert "A tier behind this one" in printed
        lines = [line.split() for line in printed.splitlines()]
        assert ["1d", "60.0", "%"] in [line[:3] for line in lines]


def test_the_next_server_knows_what_the_last_one_evicted() -> None:
    """Its counters begin anew, as all do."""
    with mounted_with({}) as mount:
        client = client_of(mount)
        assert not client.load("block-0")
        until_missed(mount, 1)
        run_kvfs("upgrade", str(mount.path))
        mount.adopt()
        assert behind(mount)["ages"]["1d"]["missed"] == 0
        assert not client.load("block-1")
        until_missed(mount, 1)
        client.store("block-2")
        day = behind(mount)["ages"]["1d"]
        assert day["missed"] + day["stored_again"] == 2
        assert behind(mount)["daily_bytes"] == 0
