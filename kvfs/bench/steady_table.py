"""The figures of ``kvfs bench full`` as tables for a terminal."""

import statistics
from typing import Any, Final

from rich import box
from rich.table import Table

#: What issue and product promise: a full pool's rate and p99 over an emptied one's.
RATE_AT_LEAST: Final = 0.9
P99_AT_MOST: Final = 1.5


def sides_table(report: dict[str, Any]) -> Table:
    """Return one line a side: medians over the rounds."""
    table = Table(title="Stores; medians over the rounds", box=box.SIMPLE_HEAD)
    table.add_column("where", no_wrap=True)
    for heading in ("GB/s", "p50 us", "p99 us", "refused"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, rounds in report["sides"].items():
        middle = {
            key: statistics.median(each[key] for each in rounds)
            for key in ("rate_bytes_s", "p50_us", "p99_us")
        }
        table.add_row(
            name,
            f"{middle['rate_bytes_s'] / 1e9:.2f}",
            f"{middle['p50_us']:.0f}",
            f"{middle['p99_us']:.0f}",
            str(report["refused"][name]),
        )
    return table


def ratios_table(report: dict[str, Any]) -> Table:
    """Return the ratios with their bounds."""
    table = Table(title="Ratios, round by round", box=box.SIMPLE_HEAD)
    table.add_column("ratio", no_wrap=True)
    for heading in ("measured", "bound"):
        table.add_column(heading, justify="right", no_wrap=True)
    rate, p99 = report["full_to_empty_rate"], report["full_to_empty_p99"]
    table.add_row("rate, full over emptied", f"{rate:.2f}", f"at least {RATE_AT_LEAST}")
    table.add_row("p99, full over emptied", f"{p99:.2f}", f"at most {P99_AT_MOST}")
    table.add_row("rate, full over XFS with a cleaner", f"{report['full_to_xfs_rate']:.2f}", "")
    table.add_row("p99, full over XFS with a cleaner", f"{report['full_to_xfs_p99']:.2f}", "")
    return table
