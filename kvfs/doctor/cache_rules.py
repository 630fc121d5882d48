"""Rules about how well the pool serves as a cache: hits, lives of blocks, times of stores."""

import shlex
from collections.abc import Mapping
from typing import Any, Final

from kvfs.core.sizes import format_size
from kvfs.doctor.facts import Facts
from kvfs.doctor.finding import Finding, Severity

#: A cache that misses more often costs more stores than it saves computing.
_HIT_RATE_LOW: Final = 0.3
#: Fewer lookups say nothing: a cache begins with misses.
_LOOKUPS_MIN: Final = 1000
#: Doubling the pool is worth it if the hit rate rises by this much.
_TWICE: Final = 2.0
_WORTH_MORE: Final = 0.1
#: Requests that share a prefix follow each other within this time (docs/eviction.md: the trace).
_LIFE_SHORT_S: Final = 900.0
#: Slow if one store in a hundred takes longer: it holds a request's memory for that time.
_STORE_SLOW_S: Final = 1.0
_STORES_MIN: Final = 100


def hit_rate(facts: Facts) -> list[Finding] | None:
    """Most lookups find nothing: the pool is too small, or nobody asks for what is stored."""
    cache = facts.status.get("cache")
    if not isinstance(cache, Mapping):
        return None
    lookups = cache["hits"] + cache["misses"]
    if lookups < _LOOKUPS_MIN or cache["hits"] >= _HIT_RATE_LOW * lookups:
        return []
    problem = f"only {cache['hits'] / lookups:.0%} of {lookups:,} lookups found their block"
    where = shlex.quote(facts.mountpoint)
    larger = _predicted(cache, _TWICE)
    if larger >= cache["hits"] / lookups + _WORTH_MORE:
        return [
            Finding(
                Severity.WARNING,
                f"{problem}; with twice the size {larger:.0%} would have: the pool is too small "
                "for what is asked for again",
                f"kvfs status {where}\nshows what other sizes would bring; mount a larger drive, "
                "or raise --capacity",
            )
        ]
    return [
        Finding(
            Severity.WARNING,
            f"{problem}, and a larger pool would help little: most of what is asked for was never "
            "stored",
            f"kvfs status {where}\nshows hits by directory; if hosts or restarts differ in their "
            "names, the connector's hashes are not stable: set PYTHONHASHSEED=0 for all",
        )
    ]


def lives(facts: Facts) -> list[Finding] | None:
    """Blocks are evicted before they are likely to be asked for again."""
    cache, used_bytes = facts.status.get("cache"), facts.status.get("used_bytes")
    if not isinstance(cache, Mapping) or used_bytes is None:
        return None
    evicted_bytes = sum(int(each["bytes"]) for each in cache["evicted"].values())
    life_s = cache["age_at_eviction"]["p50_s"]
    # Until more was evicted than the pool holds, ages say nothing about the eviction policy.
    if life_s is None or life_s >= _LIFE_SHORT_S or evicted_bytes <= used_bytes:
        return []
    where = shlex.quote(facts.mountpoint)
    fix = f"kvfs status {where}\nshows evictions by directory"
    if worst := _least_read(cache["directories"]):
        directory = shlex.quote(f"{facts.mountpoint.rstrip('/')}/{worst}")
        fix = f"setfattr -n user.kvfs.evict -v first {directory}\nis read again least"
    if facts.status.get("eviction", {}).get("policy") == "lru":
        fix += "; or mount it with --set eviction=adaptive, which keeps what is asked for again"
    return [
        Finding(
            Severity.WARNING,
            f"half of the blocks that are evicted were used less than {life_s:,.0f} s before: "
            f"{format_size(evicted_bytes)} so far, of a pool that holds {format_size(used_bytes)}",
            f"{fix}; or mount a larger drive, or raise --capacity",
        )
    ]


def store_times(facts: Facts) -> list[Finding] | None:
    """A slow store holds the connector's memory and, with some connectors, its request."""
    times = facts.status.get("store_times")
    if not isinstance(times, Mapping):
        return None
    recent = times["recent"]
    if recent["count"] < _STORES_MIN or recent["p99_s"] <= _STORE_SLOW_S:
        return []
    waits = facts.status.get("space_waits", {})
    waited = f"{waits['count']:,} requests waited for space" if waits.get("count") else ""
    fix = (
        f"kvfs status {shlex.quote(facts.mountpoint)}\nshows what keeps the space: pins, leases "
        "and open files"
        if waited
        else "vmstat 1 5\nshows whether the drive is the limit (wa, b) or the CPU (us, sy, r)"
    )
    return [
        Finding(
            Severity.WARNING,
            f"one store in a hundred takes longer than {recent['p99_s']:.1f} s, of the last "
            f"{recent['count']:,}{f'; {waited}' if waited else ''}",
            fix,
        )
    ]


def _predicted(cache: Mapping[str, Any], factor: float) -> float:
    """Return the hit rate of a pool of *factor* times the size; 0 if that is not known."""
    rates = {row["factor"]: row["hit_rate"] for row in cache["curve"]}
    return float(rates.get(factor) or 0.0)


def _least_read(directories: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the first-level directory with the fewest hits for what is stored there, or ""."""
    stored = {
        name: each["hits"] / each["stored_blocks"]
        for name, each in directories.items()
        if each["stored_blocks"] and not name.startswith("/")
    }
    return min(stored, key=lambda name: stored[name], default="")
