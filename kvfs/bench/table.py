"""The results as a table for a terminal."""

from collections.abc import Sequence
from typing import NamedTuple

from rich import box
from rich.table import Table

from kvfs.bench.results import DaemonCost, JobResult


class ResultRow(NamedTuple):
    """One line of the table, as text."""

    job: str
    baseline: str
    kvfs: str
    ratio: str
    spread: str
    goal: str
    daemon: str


def row_of(result: JobResult) -> ResultRow:
    """Return the line of *result*."""
    comparison, goal = result.comparison, result.job.goal
    ratio = comparison.ratio
    return ResultRow(
        job=result.job.name,
        baseline=f"{_digits(comparison.baseline.median)} {result.unit}",
        kvfs=f"{_digits(comparison.kvfs.median)} {result.unit}",
        ratio=f"{ratio.median:.2f}",
        spread=f"{ratio.lower_quarter:.2f} - {ratio.upper_quarter:.2f}",
        goal=f"{goal.at_least:.2f}" if goal else "",
        daemon=f"{result.daemon_us.median:.1f} us" if result.daemon_us else "",
    )


def results_table(results: Sequence[JobResult], baseline_name: str) -> Table:
    """Return the table of all *results*; *baseline_name* heads the baseline's column."""
    title = "Medians; the ratio is kvfs over the baseline, pair by pair"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("job", no_wrap=True)
    for heading in (baseline_name, "kvfs", "ratio", "middle half", "goal", "daemon CPU/op"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        row = row_of(result)
        table.add_row(*row._replace(ratio=_coloured(row.ratio, result.met)))
    return table


def costs_table(costs: Sequence[DaemonCost], rss_anon_bytes: int) -> Table:
    """Return the table of the server's costs that have a limit, and of its memory."""
    table = Table(title="The kvfs server", box=box.SIMPLE_HEAD)
    table.add_column("cost", no_wrap=True)
    for heading in ("measured", "at most"):
        table.add_column(heading, justify="right", no_wrap=True)
    for cost in costs:
        if cost.measured is not None:
            measured = _coloured(f"{cost.measured:.1f} {cost.unit}", cost.measured <= cost.at_most)
            table.add_row(f"CPU, {cost.title}", measured, f"{cost.at_most:.0f} {cost.unit}")
    table.add_row("memory (RssAnon)", f"{rss_anon_bytes / (1 << 20):.0f} MiB", "")
    return table


def _digits(rate: float) -> str:
    """Return *rate* with about three digits: more would claim a precision that no run has."""
    return f"{rate:.{2 if rate < 10 else 1 if rate < 100 else 0}f}"


def _coloured(text: str, met: bool | None) -> str:
    if met is None:
        return text
    return f"[green]{text}[/green]" if met else f"[red]{text}[/red]"
