"""The alert rules of docs/monitoring: each fires when it should, and is silent when it should be.

By Prometheus' own checker (``promtool test rules``), on series that are made up.
"""

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from tests.support.mounts.mounting import ROOT
from tests.support.rules.metric_document import promtool

RULES: Final = ROOT / "docs" / "monitoring" / "kvfs-alerts.yml"
MOUNT: Final = 'instance="a",mount="/kv"'
#: Samples a minute, two hours long.
STEPS: Final = 120


def grows(by: float) -> str:
    """A counter that gains *by* a minute."""
    return f"0+{by}x{STEPS}"


def stays(value: float) -> str:
    return f"{value}x{STEPS}"


def at_last(value: float) -> str:
    """A counter that is 0 until a few minutes before the look."""
    return f"0x{STEPS - 5} {value}x5"


def stores(slow: float, fast: float) -> dict[str, str]:
    """Buckets of stores, *slow* and *fast* ones a minute."""
    return {
        f'kvfs_store_duration_seconds_bucket{{{MOUNT},le="0.067"}}': grows(fast),
        f'kvfs_store_duration_seconds_bucket{{{MOUNT},le="1.07"}}': grows(fast),
        f'kvfs_store_duration_seconds_bucket{{{MOUNT},le="8.6"}}': grows(fast + slow),
        f'kvfs_store_duration_seconds_bucket{{{MOUNT},le="+Inf"}}': grows(fast + slow),
        f"kvfs_store_duration_seconds_count{{{MOUNT}}}": grows(fast + slow),
    }


def lookups(hits: float, misses: float) -> dict[str, str]:
    """Hits in two directories and misses in one, a minute."""
    return {
        f'kvfs_hits_total{{{MOUNT},directory="a"}}': grows(hits / 2),
        f'kvfs_hits_total{{{MOUNT},directory="b"}}': grows(hits / 2),
        f'kvfs_misses_total{{{MOUNT},directory="a"}}': grows(misses),
    }


def eviction(used_bytes: float, evicted_bytes: float) -> dict[str, str]:
    """What is used, and what is evicted for two reasons, a minute."""
    return {
        f"kvfs_used_bytes{{{MOUNT}}}": stays(used_bytes),
        f'kvfs_evicted_bytes_total{{{MOUNT},reason="space"}}': grows(evicted_bytes / 2),
        f'kvfs_evicted_bytes_total{{{MOUNT},reason="names"}}': grows(evicted_bytes / 2),
    }


class Case(NamedTuple):
    """One alert, with series on which it fires and others on which it does not."""

    alert: str
    severity: str
    fires: dict[str, str]
    silent: dict[str, str]


#: A case for each alternative of an alert.
CASES: Final = (
    Case(
        "KvfsDown",
        "critical",
        {'up{job="kvfs",instance="a"}': stays(0)},
        {'up{job="kvfs",instance="a"}': stays(1), 'up{job="node",instance="a"}': stays(0)},
    ),
    Case(
        "KvfsTextfileStale",
        "critical",
        # At the look it is 7,080 s; the file was last written at 0, or 30 s before.
        {'node_textfile_mtime_seconds{instance="a",file="/x/kvfs.prom"}': stays(0)},
        {
            'node_textfile_mtime_seconds{instance="a",file="/x/kvfs.prom"}': stays(7050),
            'node_textfile_mtime_seconds{instance="a",file="/x/apt.prom"}': stays(0),
        },
    ),
    Case(
        "KvfsDeviceLost",
        "critical",
        {f"kvfs_device_lost{{{MOUNT}}}": stays(1)},
        {f"kvfs_device_lost{{{MOUNT}}}": stays(0)},
    ),
    Case(
        "KvfsDeviceSilent",
        "critical",
        {f"kvfs_device_silent{{{MOUNT}}}": stays(1)},
        {f"kvfs_device_silent{{{MOUNT}}}": stays(0)},
    ),
    *(
        Case(alert, severity, {f"{name}": at_last(1)}, {f"{name}": stays(7)})
        for alert, severity, name in (
            ("KvfsBlocksLost", "critical", f"kvfs_lost_blocks_total{{{MOUNT}}}"),
            ("KvfsBlocksLost", "critical", f"kvfs_write_back_failures_total{{{MOUNT}}}"),
            ("KvfsIndexDamaged", "warning", f"kvfs_damaged_rows_total{{{MOUNT}}}"),
            ("KvfsIndexDamaged", "warning", f"kvfs_background_failures_total{{{MOUNT}}}"),
            ("KvfsStoresRefused", "warning", f"kvfs_space_waits_rejected_total{{{MOUNT}}}"),
        )
    ),
    Case(
        "KvfsStoresRefused",
        "warning",
        {f'kvfs_errors_total{{{MOUNT},errno="ENOSPC"}}': at_last(1)},
        {
            f'kvfs_errors_total{{{MOUNT},errno="ENOSPC"}}': stays(3),
            f'kvfs_errors_total{{{MOUNT},errno="EPERM"}}': grows(5),
        },
    ),
    Case(
        "KvfsLittleEvictable",
        "warning",
        {f"kvfs_little_evictable{{{MOUNT}}}": stays(1)},
        {f"kvfs_little_evictable{{{MOUNT}}}": at_last(1)},
    ),
    Case(
        "KvfsStoresWait",
        "warning",
        {f"kvfs_space_waits_seconds_total{{{MOUNT}}}": grows(30)},
        {f"kvfs_space_waits_seconds_total{{{MOUNT}}}": grows(6)},
    ),
    Case("KvfsStoresSlow", "warning", stores(slow=30, fast=600), stores(slow=3, fast=600)),
    Case("KvfsStoresSlow", "warning", stores(slow=60, fast=0), stores(slow=2, fast=0)),
    Case("KvfsHitRateLow", "info", lookups(60, 540), lookups(300, 300)),
    Case("KvfsHitRateLow", "info", lookups(0, 600), lookups(1, 20)),
    Case("KvfsBlocksShortLived", "info", eviction(6e11, 6e10), eviction(6e11, 1e10)),
)


def test_promtool_accepts_the_rules() -> None:
    assert "12 rules found" in promtool("check", "rules", RULES)


def test_each_alert_has_a_case() -> None:
    told = RULES.read_text()
    assert {case.alert for case in CASES} == {
        line.split()[-1] for line in told.splitlines() if "- alert:" in line
    }
    assert told.count("- alert:") == 12


def unit_test(case: Case, series: dict[str, str], firing: int) -> dict[str, Any]:
    """One test of promtool: so many of the alert fire on *series*."""
    alert = f'ALERTS{{alertname="{case.alert}",alertstate="firing",severity="{case.severity}"}}'
    samples = [{"labels": "{}", "value": firing}] if firing else []
    return {
        "name": f"{case.alert}: {firing} firing",
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": f"count({alert})", "eval_time": f"{STEPS - 2}m", "exp_samples": samples}
        ],
    }


def run(tests: list[dict[str, Any]], place: Path) -> str:
    """Let promtool run *tests*; YAML holds JSON."""
    file = place / "tests.yml"
    file.write_text(
        json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests})
    )
    return promtool("test", "rules", file)


def test_each_alert_fires_and_stays_silent(tmp_path: Path) -> None:
    tests = [unit_test(case, case.fires, 1) for case in CASES]
    tests += [unit_test(case, case.silent, 0) for case in CASES]
    assert "SUCCESS" in run(tests, tmp_path)


def test_an_alert_that_does_what_it_should_not_is_found(tmp_path: Path) -> None:
    for series, firing in ((CASES[0].fires, 0), (CASES[0].silent, 1)):
        with pytest.raises(AssertionError, match="FAILED"):
            run([unit_test(CASES[0], series, firing)], tmp_path)
