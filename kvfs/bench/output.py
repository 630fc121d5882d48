"""What the user sees: progress while it runs, then a table, and the files that were asked for."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import IO, Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from kvfs.bench.jobs import Job
from kvfs.bench.plot import plot
from kvfs.bench.report import build_report
from kvfs.bench.results import JobRuns, daemon_costs, summarise
from kvfs.bench.table import costs_table, results_table, row_of
from kvfs.errors import UsageError

_STDOUT = "-"
#: The tables' width: on a narrower terminal lines wrap, but no digit is cut off.
_COLUMNS = 104


class Output:
    """The terminal and the files; progress goes to stderr, and the tables too with ``--json -``.

    The files are opened first: a wrong path is told before the run, not after it.
    """

    def __init__(self, json_path: str | None, plot_path: str | None) -> None:
        self._json_path = json_path
        self._plot_path = plot_path
        self._notes = Console(stderr=True, highlight=False)
        width = max(_COLUMNS, self._notes.width)
        self._tables = Console(stderr=json_path == _STDOUT, highlight=False, width=width)
        self._stack = ExitStack()
        self._json: IO[str] | None = None
        self._plot: IO[str] | None = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed} of {task.total} pairs"),
            TimeRemainingColumn(),
            console=self._notes,
            transient=True,
            disable=not self._notes.is_terminal,
        )
        self._task = TaskID(0)

    def __enter__(self) -> Self:
        try:
            if self._json_path not in (None, _STDOUT):
                self._json = self._stack.enter_context(open(str(self._json_path), "w"))
            if self._plot_path is not None:
                self._plot = self._stack.enter_context(open(self._plot_path, "w"))
        except OSError as error:
            self._stack.close()
            raise UsageError(f"{error.filename}: {error.strerror}") from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()
        self._stack.close()

    def say(self, text: str) -> None:
        """Tell of a step that takes a while, or of something to know."""
        self._notes.print(text, style="dim")

    def begin(self, jobs: Sequence[Job], pairs: int) -> None:
        """Start the progress bar."""
        self._task = self._progress.add_task("", total=len(jobs) * pairs)
        self._progress.start()

    def start_job(self, job: Job) -> None:
        """Name the job that runs now."""
        self._progress.update(self._task, description=job.name)

    def tick(self) -> None:
        """Count one pair."""
        self._progress.advance(self._task)

    def end_job(self, runs: JobRuns) -> None:
        """Show a job's line as soon as it is known; a log of a long run shows where it is."""
        row = row_of(summarise(runs))
        self._notes.print(f"{row.job:30}{row.baseline:>12}{row.kvfs:>12}{row.ratio:>7}")

    def show(self, runs: Sequence[JobRuns], setting: Mapping[str, Any]) -> None:
        """Print the tables and write the files."""
        self._progress.stop()
        results = [summarise(each) for each in runs]
        baseline_name = str(setting["baseline"]["fs_type"])
        self._tables.print(results_table(results, baseline_name))
        if setting["rss_anon_bytes"] is not None:
            self._tables.print(costs_table(daemon_costs(results), setting["rss_anon_bytes"]))
            self._tables.print(f"data path: {setting['mount']['data_path']}")
        text = json.dumps(build_report(results, setting), indent=1) + "\n"
        if self._json is not None:
            self._json.write(text)
        elif self._json_path == _STDOUT:
            print(text, end="")
        if self._plot is not None:
            self._plot.write(plot(results, baseline_name))
