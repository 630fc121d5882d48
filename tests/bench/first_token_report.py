"""What measure_first_token has found: its samples summed up, and the table. Pure."""

import statistics
from typing import Any, Final

from rich import box
from rich.table import Table

from kvfs.bench.jobs import GIGABYTE
from kvfs.core.sizes import format_size

RECOMPUTED: Final = "recomputed"
XFS: Final = "XFS"
POOL: Final = "kvfs"
RESTARTED: Final = "kvfs, restarted"
FULL: Final = "kvfs, full"
_P99: Final = 0.99


def rows(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each prompt size, place and state of the page cache. Pure."""
    groups: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
    for sample in samples:
        key = (sample["tokens"], sample["place"], sample["cache"])
        groups.setdefault(key, []).append(sample)
    return [_row(key, groups[key]) for key in sorted(groups, key=lambda key: key[0])]


def _row(key: tuple[int, str, str], group: list[dict[str, Any]]) -> dict[str, Any]:
    each_s = sorted(sample["first_token_s"] for sample in group)
    row = {"tokens": key[0], "place": key[1], "cache": key[2], "runs": len(group)}
    row |= {"median_s": statistics.median(each_s)}
    row |= {"p99_s": each_s[min(len(each_s) - 1, int(len(each_s) * _P99))]}
    if key[1] != RECOMPUTED:
        rate_bytes_s = statistics.median(sample["bytes"] / sample["load_s"] for sample in group)
        same = sum(sample["same_token"] for sample in group)
        row |= {"bytes": group[0]["bytes"], "load_bytes_s": rate_bytes_s, "same_token": same}
        row |= {"load_median_s": statistics.median(sample["load_s"] for sample in group)}
    return row


def table(report: dict[str, Any]) -> Table:
    """Return a line a row of the report."""
    shown = Table(title="Time to the first token", box=box.SIMPLE_HEAD)
    for heading in ("tokens", "place", "page cache", "runs", "median ms", "p99 ms", "KV", "GB/s"):
        shown.add_column(heading, justify="left" if heading == "place" else "right")
    for row in report["rows"]:
        loaded = "bytes" in row
        shown.add_row(
            f"{row['tokens']:,}",
            row["place"],
            row["cache"],
            str(row["runs"]),
            f"{row['median_s'] * 1e3:.1f}",
            f"{row['p99_s'] * 1e3:.1f}",
            format_size(row["bytes"]) if loaded else "",
            f"{row['load_bytes_s'] / GIGABYTE:.2f}" if loaded else "",
        )
    return shown
