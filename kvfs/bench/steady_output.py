"""Progress, tables and the file of ``kvfs bench full``."""

import json
from types import TracebackType
from typing import IO, Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kvfs.bench.steady_table import ratios_table, sides_table
from kvfs.errors import UsageError

_STDOUT = "-"


class SteadyOutput:
    """Progress on stderr; the tables on stdout, or on stderr too when the JSON goes to stdout."""

    def __init__(self, json_path: str | None, rounds: int) -> None:
        self._json_path = json_path
        self._file: IO[str] | None = None
        self._notes = Console(stderr=True, highlight=False)
        self._tables = Console(stderr=json_path == _STDOUT, highlight=False)
        self._progress = Progress(
            TextColumn("rounds"),
            BarColumn(),
            TextColumn("{task.completed} of {task.total}"),
            TimeRemainingColumn(),
            console=self._notes,
            transient=True,
            disable=not self._notes.is_terminal,
        )
        self._task = self._progress.add_task("", total=rounds)

    def __enter__(self) -> Self:
        if self._json_path not in (None, _STDOUT):
            try:
                self._file = open(str(self._json_path), "w")
            except OSError as error:
                raise UsageError(f"{error.filename}: {error.strerror}") from None
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()
        if self._file is not None:
            self._file.close()

    def say(self, text: str) -> None:
        """Tell of a step that takes a while."""
        self._notes.print(text, style="dim")

    def tick(self) -> None:
        """Count one round."""
        self._progress.advance(self._task)

    def show(self, report: dict[str, Any]) -> None:
        """Print the tables and write the file."""
        self._progress.stop()
        self._tables.print(sides_table(report))
        self._tables.print(ratios_table(report))
        text = json.dumps(report, indent=1) + "\n"
        if self._file is not None:
            self._file.write(text)
        elif self._json_path == _STDOUT:
            print(text, end="")
