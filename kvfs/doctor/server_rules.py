"""Rules about the server: what its process may use, what ends it, and how it serves as a cache.

The last are about hits, lives of blocks, and times of stores.
"""

import shlex
from collections.abc import Mapping
from typing import Any, Final

from kvfs.core.settings import Settings
from kvfs.core.sizes import format_size
from kvfs.doctor.facts import Facts, Limits
from kvfs.doctor.finding import Finding, Severity
from kvfs.machine.hardware import MAX_REQUEST_TIMEOUT

#: Enough for recently opened blocks (backing_ids_max), ready extents and open blocks.
_OPEN_FILES_LOW: Final = 65_536
_OPEN_FILES_WANTED: Final = Settings().open_files_max
_NEARLY_ALL_SHARE: Final = 0.8
#: Needed by the server beside its index. On the daemon path the page cache of every block that the
#: server moves is charged to it, too.
_MEMORY_SERIOUS_BYTES: Final = 512 << 20
_MEMORY_LOW_BYTES: Final = 2 << 30
_OOM_SCORE_WANTED: Final = Settings().oom_score_adj
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


def request_timeout(facts: Facts) -> list[Finding] | None:
    """A request timeout does not fail one request: it aborts the whole connection."""
    wait_s, timeout_s = facts.status.get("request_wait_max_s"), facts.request_timeout_max_s
    if wait_s is None or timeout_s is None:
        return None
    if not timeout_s or timeout_s > wait_s:
        return []
    return [
        Finding(
            Severity.SERIOUS,
            f"{MAX_REQUEST_TIMEOUT} = {timeout_s} (seconds): the kernel aborts the whole mount "
            f"when one request takes longer, and here one may wait for {wait_s:g} s",
            f"sysctl -w {MAX_REQUEST_TIMEOUT}=0\n"
            "then unmount and mount: the limit is agreed on at the mount",
        )
    ]


def supervisor(facts: Facts) -> list[Finding] | None:
    """Without a supervisor the server's death ends the mount: calls fail until the next mount."""
    if "supervisor_pid" not in facts.status:
        return None
    if facts.status["supervisor_pid"]:
        return []
    where, source = shlex.quote(facts.mountpoint), shlex.quote(facts.source)
    return [
        Finding(
            Severity.WARNING,
            "the server has no supervisor, which would start another one: if it dies, the mount is "
            "dead, and all calls on it fail",
            f"kvfs umount {where} && kvfs mount {source} {where}\n"
            "when nobody uses it, with the same options; everything stored is still there",
        )
    ]


def open_files(facts: Facts) -> list[Finding] | None:
    """For every open block the server has an extent open."""
    if facts.limits is None:
        return None
    used, most = facts.limits.open_files, facts.limits.open_files_max
    if used < _NEARLY_ALL_SHARE * most and most >= _OPEN_FILES_LOW:
        return []
    nearly = used >= _NEARLY_ALL_SHARE * most
    wanted = max(_OPEN_FILES_WANTED, 2 * most if nearly else 0)
    fix = f"prlimit --pid {facts.server_pid} --nofile={wanted}:{wanted}"
    if facts.limits.unit:
        fix += f"\nfor good: LimitNOFILE={wanted} by `systemctl edit {facts.limits.unit}`"
    return [
        Finding(
            Severity.SERIOUS if nearly else Severity.WARNING,
            f"the server may have {most} files open, and has {used}: opens fail beyond it",
            fix,
        )
    ]


def memory_bound(facts: Facts) -> list[Finding] | None:
    """A server that reaches its memory limit is killed, or waits for its own page cache."""
    if facts.limits is None:
        return None
    most_bytes = facts.limits.memory_max_bytes
    # The tmpfs pages of the index are charged to the server that wrote them.
    index_bytes = (facts.status.get("index_memory") or {}).get("bytes") or 0
    if most_bytes is None or most_bytes >= _MEMORY_LOW_BYTES + index_bytes:
        return []
    serious = most_bytes < _MEMORY_SERIOUS_BYTES + index_bytes
    return [
        Finding(
            Severity.SERIOUS if serious else Severity.WARNING,
            f"the server may use {format_size(most_bytes)} of memory: too little for it and its "
            "index; beyond it the kernel kills the server or makes it wait",
            _property("MemoryMax=infinity", facts.limits, facts.limits.memory_group),
        )
    ]


def cpu_bound(facts: Facts) -> list[Finding] | None:
    """While a server is throttled, every open waits for its next share of CPU time."""
    if facts.limits is None:
        return None
    if facts.limits.cpus_max is None or facts.limits.cpus_max >= 1:
        return []
    return [
        Finding(
            Severity.WARNING,
            f"the server may use {facts.limits.cpus_max:.2f} of a CPU: every open and store waits "
            "while it is throttled",
            _property("CPUQuota=", facts.limits, facts.limits.cpu_group),
        )
    ]


def _property(assignment: str, limits: Limits, file: str) -> str:
    """Return the command that lifts the limit in a control group's *file*.

    A systemd unit's limit is lifted by systemd, which would otherwise restore it. No limit is "max"
    in the files of version 2, -1 in those of version 1 (cgroups(7)).
    """
    group = file.rpartition("/")[0].rpartition("/")[2]
    unit = group if group.endswith((".service", ".slice", ".scope")) else limits.unit
    if unit and (not file or unit == group):
        return f"systemctl set-property {shlex.quote(unit)} {assignment}"
    none = "max" if file.endswith(".max") else "-1"
    return f"echo {none} > {shlex.quote(file)}"


def oom_killer(facts: Facts) -> list[Finding] | None:
    """The server is small and its death stalls everybody: it should be killed last."""
    if facts.limits is None:
        return None
    if facts.limits.oom_score_adj <= 0:
        return []
    return [
        Finding(
            Severity.WARNING,
            f"the kernel's OOM killer prefers the server (oom_score_adj "
            f"{facts.limits.oom_score_adj}); its death ends the mount",
            f"echo {_OOM_SCORE_WANTED} > /proc/{facts.server_pid}/oom_score_adj",
        )
    ]


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
