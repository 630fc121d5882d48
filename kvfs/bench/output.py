"""What the user sees of a run: progress, the line of each finished job, tables, files."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from kvfs.bench.jobs import Job
from kvfs.bench.plot import plot
from kvfs.bench.report import build_report
from kvfs.bench.results import JobRuns, daemon_costs, summarise
from kvfs.bench.table import costs_table, results_table, row_of
from kvfs.core.errors import CommandError, UsageError

_STDOUT: Final = "-"
#: Width of the tables: on a narrower terminal lines wrap, but no digit is cut off.
_COLUMNS: Final = 104


class Output:
    """The terminal and the files. Progress goes to stderr; with ``--json -`` the tables do, too.

    The files are tried first, so a wrong path is reported before the run. Their old content stays
    until there is something to replace it.
    """

    def __init__(self, json_path: str | None, plot_path: str | None) -> None:
        self._json_path = json_path
        self._plot_path = plot_path
        self._notes = Console(stderr=True, highlight=False)
        width = max(_COLUMNS, self._notes.width)
        self._tables = Console(stderr=json_path == _STDOUT, highlight=False, width=width)
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
        if self._json_path not in (None, _STDOUT):
            try_file(str(self._json_path))
        if self._plot_path is not None:
            try_file(self._plot_path)
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

    def begin(self, total: int) -> None:
        """Start the progress bar."""
        self._task = self._progress.add_task("", total=total)
        self._progress.start()

    def tick(self) -> None:
        """Count one pair."""
        self._progress.advance(self._task)

    def start_job(self, job: Job) -> None:
        """Name the job that runs now."""
        self._progress.update(self._task, description=job.name)

    def end_job(self, runs: JobRuns) -> None:
        """Show a job's line at once, so that the log of a long run shows how far it is."""
        row = row_of(summarise(runs))
        self._notes.print(f"{row.job:30}{row.baseline:>12}{row.kvfs:>12}{row.ratio:>7}")

    def show(self, runs: Sequence[JobRuns], setting: Mapping[str, Any]) -> None:
        """End the progress, print the tables and write the files."""
        self._progress.stop()
        results = [summarise(each) for each in runs]
        baseline_name = str(setting["baseline"]["fs_type"])
        self._tables.print(results_table(results, baseline_name))
        if setting["rss_anon_bytes"] is not None:
            self._tables.print(costs_table(daemon_costs(results), setting["rss_anon_bytes"]))
            self._tables.print(f"data path: {setting['mount']['data_path']}")
        text = json.dumps(build_report(results, setting), indent=1) + "\n"
        if self._json_path == _STDOUT:
            print(text, end="")
        elif self._json_path is not None:
            write_file(self._json_path, text)
        if self._plot_path is not None:
            write_file(self._plot_path, plot(results, baseline_name))


def try_file(path: str) -> None:
    """Raise UsageError unless file *path* can be written; the file is not changed."""
    is_new = not os.path.lexists(path)
    if not is_new and not os.path.isfile(path) and not os.path.isdir(path):
        return  # opening and closing a pipe would show its reader an end
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
