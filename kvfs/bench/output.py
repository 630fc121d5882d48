"""What the user sees of a run: progress, the line of each finished job, tables, files.

docs/performance.md says what each field of the JSON file means. The picture has a line for each
job, a dot for each pair, and a bar at the median.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvfs.bench.jobs import DaemonCost, JobResult, JobRuns, Spread, daemon_costs, summarise
from kvfs.core.errors import CommandError, UsageError
from kvfs.core.sizes import MIB

_STDOUT: Final = "-"
#: Width of the tables: on a narrower terminal lines wrap, but no digit is cut off.
_COLUMNS: Final = 80
#: Goes up when a field changes its meaning or is removed.
REPORT_FORMAT: Final = 1
#: The picture: widths and heights in pixels, and the step of its grid.
_LEFT: Final = 210
_SCALE: Final = 560
_RIGHT: Final = 90
_TOP: Final = 64
_ROW: Final = 28
_GRID: Final = 0.25
#: A larger ratio is drawn at the edge, so that one outlier does not squeeze all others.
_MOST: Final = 2.0
_GOOD, _BAD, _PLAIN = "#1a7f37", "#cf222e", "#0969da"


class ResultRow(NamedTuple):
    """One line of the table, as text."""

    job: str
    baseline: str
    kvfs: str
    ratio: str
    spread: str
    goal: str
    daemon: str


class Screen:
    """The terminal and the files. Progress goes to stderr; with ``--json -`` the tables do, too.

    The files are tried first, so a wrong path is reported before the run. Their old content stays
    until there is something to replace it.
    """

    def __init__(self, json_path: str | None, *more_paths: str | None, steps: str) -> None:
        """*steps* names what the progress bar counts."""
        self._json_path = json_path
        self._paths = [path for path in (json_path, *more_paths) if path not in (None, _STDOUT)]
        self._notes = Console(stderr=True, highlight=False)
        width = max(_COLUMNS, self._notes.width)
        self._tables = Console(stderr=json_path == _STDOUT, highlight=False, width=width)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed} of {task.total} {task.fields[unit]}"),
            TimeRemainingColumn(),
            console=self._notes,
            transient=True,
            disable=not self._notes.is_terminal,
        )
        self._task = TaskID(0)
        self._steps = steps
        self._filling: TaskID | None = None

    def __enter__(self) -> Self:
        for path in self._paths:
            try_file(str(path))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Print a line about a step that takes a while, or something worth knowing."""
        self._notes.print(text, style="dim")

    def begin(self, total: int, what: str = "") -> None:
        """Start a progress bar for *what*, in place of the one before."""
        for task in self._progress.task_ids:
            self._progress.remove_task(task)
        self._task = self._progress.add_task(what, total=total, unit=self._steps)
        self._progress.start()

    def fill(self, filled_bytes: int, total_bytes: int) -> None:
        """Show how much of the devices is filled, beside the bar that is there."""
        done, total = filled_bytes // MIB, total_bytes // MIB
        if self._filling is None:
            what = "filling the devices"
            self._filling = self._progress.add_task(what, total=total, unit="MiB")
            self._progress.start()
        self._progress.update(self._filling, completed=done, total=total)
        if filled_bytes >= total_bytes:
            self._progress.remove_task(self._filling)
            self._filling = None

    def count(self, steps: int = 1) -> None:
        """Count *steps* more."""
        self._progress.advance(self._task, steps)

    def describe(self, what: str) -> None:
        """Name what runs now."""
        self._progress.update(self._task, description=what)

    def show_table(self, table: Table, words: Iterable[str] = ()) -> None:
        """Print *table*, and what it comes to in *words*, a sentence a line."""
        self._tables.print(table)
        for sentence in words:
            self._tables.print(f"- {sentence}")

    def write_report(self, report: Mapping[str, Any]) -> None:
        """End the progress, and write *report* to the JSON file if one was asked for."""
        self._progress.stop()
        text = json.dumps(report, indent=1) + "\n"
        if self._json_path == _STDOUT:
            print(text, end="")
        elif self._json_path is not None:
            write_file(self._json_path, text)


class Output(Screen):
    """What the user sees of ``kvfs bench``."""

    def __init__(self, json_path: str | None, plot_path: str | None) -> None:
        super().__init__(json_path, plot_path, steps="pairs")
        self._plot_path = plot_path

    def end_job(self, runs: JobRuns) -> None:
        """Show a job's line at once, so that the log of a long run shows how far it is."""
        row = row_of(summarise(runs))
        self._notes.print(f"{row.job:30}{row.baseline:>12}{row.kvfs:>12}{row.ratio:>7}")

    def show(self, runs: Sequence[JobRuns], setting: Mapping[str, Any]) -> None:
        """End the progress, print the tables and write the files."""
        self._progress.stop()
        results = [summarise(each) for each in runs]
        baseline_name = str(setting["baseline"]["fs_type"])
        self.show_table(results_table(results, baseline_name))
        if setting["rss_anon_bytes"] is not None:
            self.show_table(costs_table(daemon_costs(results), setting["rss_anon_bytes"]))
            self._tables.print(f"data path: {setting['mount']['data_path']}")
        self.write_report(build_report(results, setting))
        if self._plot_path is not None:
            write_file(self._plot_path, plot(results, baseline_name))


def try_file(path: str) -> None:
    """Raise UsageError unless file *path* can be written; the file is not changed."""
    is_new = not os.path.lexists(path)
    if not is_new and not os.path.isfile(path) and not os.path.isdir(path):
        return  # opening and closing a pipe would give its reader an end of file
    try:
        open(path, "ab").close()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    if is_new:
        os.unlink(path)


def write_file(path: str, text: str) -> None:
    """Write *text* to file *path*. Raises CommandError."""
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None


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


def row_of(result: JobResult) -> ResultRow:
    """Return the line of *result*."""
    comparison, goal = result.comparison, result.job.goal
    ratio = comparison.ratio
    return ResultRow(
        job=result.job.name,
        baseline=f"{_digits(comparison.baseline.median)} {result.unit}",
        kvfs=f"{_digits(comparison.kvfs.median)} {result.unit}",
        ratio=f"{ratio.median:.2f}",
        spread=f"{ratio.lower_quarter:.2f}-{ratio.upper_quarter:.2f}",
        goal=f"{goal.at_least:.2f}" if goal else "",
        daemon=f"{result.daemon_us.median:.1f} us" if result.daemon_us else "",
    )


def results_table(results: Sequence[JobResult], baseline_name: str) -> Table:
    """Return the table of all *results*; *baseline_name* heads the baseline's column."""
    title = "Medians; the ratio is kvfs over the baseline, pair by pair"
    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("job", no_wrap=True)
    headings = (baseline_name, "kvfs", "ratio", "middle\nhalf", "goal", "CPU/op")
    for heading in headings:
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


def plot(results: Sequence[JobResult], baseline_name: str) -> str:
    """Return an SVG document of the ratios of *results*."""
    highest = max((r for result in results for r in result.comparison.ratios), default=1.0)
    right = _GRID * (int(min(max(highest, 1.0), _MOST) / _GRID) + 1)
    width, bottom = _LEFT + _SCALE + _RIGHT, _TOP + _ROW * len(results)
    title = f"kvfs / {baseline_name}: each dot one pair of runs, bars the medians"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 40}" '
        f'font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{bottom + 40}" fill="#ffffff"/>',
        f'<text x="16" y="28" font-size="16">{escape(title)}</text>',
    ]
    for step in range(round(right / _GRID) + 1):
        lines += _grid_line(step * _GRID, right, bottom)
    for number, result in enumerate(results):
        lines += _row(result, _TOP + _ROW * number + _ROW // 2, right)
    lines.append(
        f'<text x="{_LEFT}" y="{bottom + 34}" fill="#57606a">'
        "to the right is faster; an open triangle marks the goal</text>"
    )
    return "\n".join([*lines, "</svg>\n"])


def _x(ratio: float, right: float) -> str:
    return f"{_LEFT + _SCALE * min(ratio, right) / right:.1f}"


def _grid_line(ratio: float, right: float, bottom: int) -> list[str]:
    x, even = _x(ratio, right), ratio == 1.0
    colour, weight = ("#24292f", 1.5) if even else ("#d0d7de", 1)
    return [
        f'<line x1="{x}" y1="{_TOP - 8}" x2="{x}" y2="{bottom}" stroke="{colour}" '
        f'stroke-width="{weight}"/>',
        f'<text x="{x}" y="{_TOP - 14}" text-anchor="middle" fill="#57606a">{ratio:.2f}</text>',
    ]


def _row(result: JobResult, y: int, right: float) -> list[str]:
    ratio, goal = result.comparison.ratio, result.job.goal
    colour = {None: _PLAIN, True: _GOOD, False: _BAD}[result.met]
    middle = _x(ratio.median, right)
    lines = [f'<text x="{_LEFT - 12}" y="{y + 4}" text-anchor="end">{result.job.name}</text>']
    lines += [
        f'<circle cx="{_x(each, right)}" cy="{y}" r="4" fill="{colour}" fill-opacity="0.35"/>'
        for each in result.comparison.ratios
    ]
    lines += [
        f'<line x1="{middle}" y1="{y - 9}" x2="{middle}" y2="{y + 9}" stroke="{colour}" '
        f'stroke-width="3"/>',
        f'<text x="{_LEFT + _SCALE + 14}" y="{y + 4}" fill="{colour}">{ratio.median:.2f}</text>',
    ]
    if goal is not None:
        x = float(_x(goal.at_least, right))
        points = f"{x - 4:.1f},{y + 13} {x + 4:.1f},{y + 13} {x:.1f},{y + 6}"
        lines.append(f'<polygon points="{points}" fill="none" stroke="#57606a"/>')
    return lines
