"""What a cache did between two looks at its counters: rates, in all and for each directory."""

from collections.abc import Mapping
from typing import Any, Final

#: The counters of `kvfs status` whose rates are reported.
_COUNTERS: Final = ("hits", "misses", "loaded_bytes", "stored_bytes", "evicted_bytes")

#: Each counter's rate per second, and ``hit_rate``: hits / (hits + misses), None if both are 0.
Rates = dict[str, float | None]


def rates(before: Mapping[str, Any], after: Mapping[str, Any], passed_s: float) -> dict[str, Any]:
    """Return the rates between *before* and *after*, two ``cache`` objects of one mount's status.

    The keys are ``total`` and ``directories``. A server that restarted meanwhile counts from 0.
    """
    if after["uptime_s"] < before["uptime_s"]:
        before = {"directories": {}}
    directories = {
        name: _rates(before["directories"].get(name, {}), each, passed_s)
        for name, each in after["directories"].items()
    }
    return {"total": _rates(_whole(before), _whole(after), passed_s), "directories": directories}


def busiest(directories: Mapping[str, Rates], most: int) -> list[tuple[str, Rates]]:
    """Return *most* of the directories, those with most hits and misses first."""

    def asked(row: tuple[str, Rates]) -> tuple[float, str]:
        return -((row[1]["hits"] or 0) + (row[1]["misses"] or 0)), row[0]

    return sorted(directories.items(), key=asked)[:most]


def _whole(cache: Mapping[str, Any]) -> dict[str, int]:
    """Return the counters of the whole cache: the sums of its directories."""
    tallies = cache["directories"].values()
    return {name: sum(each[name] for each in tallies) for name in _COUNTERS}


def _rates(before: Mapping[str, int], after: Mapping[str, int], passed_s: float) -> Rates:
    # A count can shrink: once a directory is removed, its counts belong to the rest.
    grown = {name: max(0, after[name] - before.get(name, 0)) for name in _COUNTERS}
    asked = grown["hits"] + grown["misses"]
    found: Rates = {name: round(count / passed_s, 3) for name, count in grown.items()}
    return {"hit_rate": grown["hits"] / asked if asked else None, **found}
