"""What ``kvfs bench compare`` shows: each job's line as soon as it is known, tables, a plot."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from kvfs.bench.jobs import Job
from kvfs.bench.output import Output, try_file, write_file
from kvfs.bench.plot import plot
from kvfs.bench.report import build_report
from kvfs.bench.results import JobRuns, daemon_costs, summarise
from kvfs.bench.table import costs_table, results_table, row_of

if TYPE_CHECKING:
    from rich.table import Table


class PairsOutput(Output):
    """Counts pairs of runs."""

    def __init__(self, json_path: str | None, plot_path: str | None) -> None:
        super().__init__(json_path, "pairs")
        self._plot_path = plot_path

    def __enter__(self) -> Self:
        super().__enter__()
        if self._plot_path is not None:
            try_file(self._plot_path)
        return self

    def start_job(self, job: Job) -> None:
        """Name the job that runs now."""
        self._progress.update(self._task, description=job.name)

    def end_job(self, runs: JobRuns) -> None:
        """Show a job's line as soon as it is known; a log of a long run shows where it is."""
        row = row_of(summarise(runs))
        self._notes.print(f"{row.job:30}{row.baseline:>12}{row.kvfs:>12}{row.ratio:>7}")

    def show_pairs(self, runs: Sequence[JobRuns], setting: Mapping[str, Any]) -> None:
        """Print the tables and write the files."""
        results = [summarise(each) for each in runs]
        baseline_name = str(setting["baseline"]["fs_type"])
        shown: list[Table | str] = [results_table(results, baseline_name)]
        if setting["rss_anon_bytes"] is not None:
            shown.append(costs_table(daemon_costs(results), setting["rss_anon_bytes"]))
            shown.append(f"data path: {setting['mount']['data_path']}")
        self.show(build_report(results, setting), *shown)
        if self._plot_path is not None:
            write_file(self._plot_path, plot(results, baseline_name))
