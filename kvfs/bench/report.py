"""The results as one JSON document; docs/performance.md says what each field means. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvfs.bench.results import JobResult, daemon_costs
from kvfs.bench.stats import Spread

#: Goes up when a field changes its meaning or is removed.
REPORT_FORMAT: Final = 1


def build_report(results: Sequence[JobResult], setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report of *results*; *setting* says what was compared, where, and how."""
    return {
        "format": REPORT_FORMAT,
        **setting,
        "jobs": [_job(result) for result in results],
        "daemon_costs": [cost._asdict() for cost in daemon_costs(results)],
    }


def _job(result: JobResult) -> dict[str, Any]:
    job, comparison, goal = result.job, result.comparison, result.job.goal
    return {
        "name": job.name,
        "kind": job.kind.value,
        "threads": job.threads,
        "size_bytes": job.size_bytes if job.moves_bytes else None,
        "mode": job.mode.value if job.moves_bytes else None,
        "unit": result.unit,
        "baseline": _spread(comparison.baseline),
        "kvfs": _spread(comparison.kvfs),
        "ratio": {**_spread(comparison.ratio), "pairs": [round(r, 4) for r in comparison.ratios]},
        "at_least": goal.at_least if goal else None,
        "aim": goal.aim if goal else None,
        "met": result.met,
        "daemon_us_per_operation": _spread(result.daemon_us) if result.daemon_us else None,
        "daemon_ms_per_gb": result.daemon_ms_per_gb,
    }


def _spread(spread: Spread) -> dict[str, float]:
    return {name: round(value, 4) for name, value in spread._asdict().items()}
