"""What the user sees of a run: progress, the line of each finished job, tables, files."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvfs.bench.plot import plot
from kvfs.bench.report import build_report
from kvfs.bench.results import JobRuns, daemon_costs, summarise
from kvfs.bench.table import costs_table, results_table, row_of
from kvfs.core.errors import CommandError, UsageError

_STDOUT: Final = "-"
#: Width of the tables: on a narrower terminal lines wrap, but no digit is cut off.
_COLUMNS: Final = 104


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
            TextColumn(f"{{task.completed}} of {{task.total}} {steps}"),
            TimeRemainingColumn(),
            console=self._notes,
            transient=True,
            disable=not self._notes.is_terminal,
        )
        self._task = TaskID(0)

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
        self._task = self._progress.add_task(what, total=total)
        self._progress.start()

    def count(self, steps: int = 1) -> None:
        """Count *steps* more."""
        self._progress.advance(self._task, steps)

    def describe(self, what: str) -> None:
        """Name what runs now."""
        self._progress.update(self._task, description=what)

    def show_table(self, table: Table) -> None:
        """Print *table*."""
        self._tables.print(table)

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
