"""What a cache did between two looks at its counters: rates, in all and for each directory."""

from collections.abc import Mapping
from typing import Any, Final

#: The counters of `kvfs status` whose rates are told.
_COUNTERS: Final = ("hits", "misses", "loaded_bytes", "stored_bytes", "evicted_bytes")

#: Rates a second, and ``hit_rate``: the share of hits meanwhile, None without hits and misses.
Rates = dict[str, float | None]


def rates(before: Mapping[str, Any], after: Mapping[str, Any], passed_s: float) -> dict[str, Any]:
    """Return what happened from *before* to *after*, two ``cache`` objects of one mount.

    A server that was started anew meanwhile counts from 0.
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
    # A removed directory is counted with all others from then on.
    grown = {name: max(0, after[name] - before.get(name, 0)) for name in _COUNTERS}
    asked = grown["hits"] + grown["misses"]
    found: Rates = {name: round(count / passed_s, 3) for name, count in grown.items()}
    return {"hit_rate": grown["hits"] / asked if asked else None, **found}
