"""Rates between two looks at a cache, also when its server was started anew in between."""

from typing import Any

from kvfs.cli.top import busiest, rates

NAMES = ("hits", "misses", "loaded_bytes", "stored_bytes", "evicted_bytes")


def cache(uptime_s: float, **hits_and_misses: tuple[int, int]) -> dict[str, Any]:
    directories = {
        name: {**dict.fromkeys(NAMES, 0), "hits": hits, "misses": misses}
        for name, (hits, misses) in hits_and_misses.items()
    }
    return {"uptime_s": uptime_s, "directories": directories}


def test_rates_are_of_the_time_between() -> None:
    found = rates(cache(10, a=(10, 10), b=(5, 0)), cache(12, a=(16, 12), b=(5, 0)), 2.0)
    assert found["directories"]["a"]["hits"] == 3
    assert found["directories"]["a"]["hit_rate"] == 0.75
    assert found["directories"]["b"]["hit_rate"] is None
    assert found["total"]["misses"] == 1


def test_a_new_directory_counts_from_nothing() -> None:
    found = rates(cache(10), cache(12, a=(4, 0)), 2.0)
    assert found["directories"]["a"]["hits"] == found["total"]["hits"] == 2


def test_a_server_that_started_anew_counts_from_nothing() -> None:
    found = rates(cache(1000, a=(900, 0)), cache(1, a=(4, 0)), 2.0)
    assert found["directories"]["a"]["hits"] == 2


def test_the_busiest_come_first() -> None:
    found = rates(cache(1), cache(2, idle=(0, 0), most=(5, 5), also=(9, 0), few=(1, 0)), 1.0)
    assert [name for name, _ in busiest(found["directories"], 3)] == ["most", "also", "few"]
