"""The tables of README and docs that benches measured, made from what they printed.

docs/measured has a file for each run: the bench's own JSON, without single samples, below a head
that says command, commit, machine and the code that it measures.

``python -m make.measured_tables`` makes all tables anew, and says how old each run is;
``python -m make.measured_tables NAME OUTPUT`` takes OUTPUT, which the command of NAME has printed,
as a run at the commit that is checked out. The pictures follow: ``python -m make.pictures``.
"""

import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvfs.core.sizes import MIB, format_size

ROOT: Final = Path(__file__).resolve().parents[1]
PLACE: Final = ROOT / "docs" / "measured"
#: A run may be so many commits older than the code that it measures; else the page says so.
COMMITS_MAX: Final = 100
_PERFORMANCE: Final = "docs/performance.md"
_README: Final = "README.md"
#: Single samples: megabytes, and nothing that a table has.
_NOT_KEPT: Final = ("samples", "pairs")

Results = Mapping[str, Any]
Rows = Iterator[Sequence[str]]


class Run(NamedTuple):
    """What docs/measured has of one run."""

    name: str
    command: str
    commit: str
    machine: str
    measures: tuple[str, ...]
    """Folders and files of the code that decides these figures."""
    results: Results


class MeasuredTable(NamedTuple):
    """A table of a page: the first with *head* below the words *below*."""

    page: str
    below: str
    head: str
    run: str
    rows: Callable[[Results], Rows]


def read_run(name: str) -> Run:
    """Return the run of that *name*."""
    told = json.loads((PLACE / f"{name}.json").read_text())
    return Run(name, **{**told, "measures": tuple(told["measures"])})


def runs() -> list[Run]:
    """Return all runs."""
    return [read_run(path.stem) for path in sorted(PLACE.glob("*.json"))]


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _jobs(results: Results) -> Rows:
    for job in results["jobs"]:
        ratio, unit, daemon = job["ratio"], job["unit"], job["daemon_us_per_operation"]
        yield (
            job["name"],
            *(f"{_digits(job[side]['median'])} {unit}" for side in ("baseline", "kvfs")),
            f"{ratio['median']:.2f}",
            f"{ratio['lower_quarter']:.2f} - {ratio['upper_quarter']:.2f}",
            f"{ratio['low']:.2f} - {ratio['high']:.2f}",
            "" if job["at_least"] is None else f"{job['at_least']:g}",
            {None: "", True: "yes", False: "**no**"}[job["met"]],
            f"{daemon['median']:.1f} us",
        )


def _server(results: Results) -> Rows:
    for cost in results["daemon_costs"]:
        if cost["measured"] is None:  # without its job
            continue
        met = "yes" if cost["measured"] <= cost["at_most"] else "**no**"
        measured = f"{cost['measured']:.1f} {cost['unit']}"
        yield f"CPU, {cost['title']}", measured, f"{cost['at_most']:g} {cost['unit']}", met
    yield "RssAnon", f"{results['rss_anon_bytes'] / MIB:.0f} MiB", "", ""


def _full(results: Results) -> Rows:
    for name, side in results["medians"].items():
        rate, refused = f"{side['rate_bytes_s'] / 1e9:.2f} GB/s", results["refused"][name]
        yield name, rate, f"{side['p50_us']:.0f} us", f"{side['p99_us']:.0f} us", str(refused)


#: The columns of the first tokens: places, each with the state of the page cache.
_PLACES: Final = (
    ("recomputed", ""),
    *((place, cache) for cache in ("cold", "warm") for place in ("XFS", "kvfs", "kvfs, restarted")),
)


def token_rows(results: Results) -> Iterator[tuple[int, int, list[tuple[float, float]]]]:
    """Yield tokens, bytes of their state, and median and p99 in seconds for each column."""
    for tokens in sorted({row["tokens"] for row in results["rows"]}):
        found = {
            (row["place"], row["cache"] if row["place"] != "recomputed" else ""): row
            for row in results["rows"]
            if row["tokens"] == tokens
        }
        each = [(found[key]["median_s"], found[key]["p99_s"]) for key in _PLACES]
        yield tokens, found["kvfs", "cold"]["bytes"], each


def _ms(time_s: float) -> str:
    return f"{1e3 * time_s:,.0f}"


def _tokens(results: Results) -> Rows:
    for tokens, size_bytes, each in token_rows(results):
        cells = (f"{_ms(median_s)} ({_ms(p99_s)})" for median_s, p99_s in each)
        yield f"{tokens:,}", format_size(size_bytes), *cells


def _tokens_in_short(results: Results) -> Rows:
    for number, (tokens, size_bytes, each) in enumerate(token_rows(results)):
        what = f"{tokens:,}" if number else f"{tokens:,} tokens"
        cells = (_ms(each[column][0]) for column in (0, 3, 5))
        yield what, format_size(size_bytes), *cells


def _both_us(times_s: Mapping[str, float]) -> str:
    return " / ".join(f"{1e6 * times_s[key]:,.0f}" for key in ("p50", "p99"))


def _replayed(results: Results) -> Rows:
    for each in results["rounds"]:
        for side in each["sides"]:
            yield (
                f"{100 * each['blocks_share']:g} %",
                side["name"],
                f"{100 * side['hit_rate']:.1f} %",
                _both_us(side["load_s"]),
                _both_us(side["store_s"]),
                f"{side['first_token_s']['mean']:.3f} s",
                "-" if side["written_bytes"] is None else f"{side['written_bytes'] / 1e9:.1f} GB",
                f"{side['server_cpu_s']:.0f} / {side['clients_cpu_s']:.0f} s",
                f"{side['refused']:,}",
            )
    computed_s = results["trace"]["computed_s"]["mean"]
    yield "none", "", "0 %", "", "", f"{computed_s:.3f} s", "", "", ""


#: Of the rounds and sides of a replay, what README has.
_LARGEST_FIRST: Final = (0.1, 0.05)
_SCRIPTS: Final = ("kvfs, lru", "XFS, cleaned every 60 s", "XFS, cleaned every 1 s")


def _replayed_in_short(results: Results) -> Rows:
    rounds = {each["blocks_share"]: each["sides"] for each in results["rounds"]}
    for share in _LARGEST_FIRST:
        sides = {side["name"]: side for side in rounds[share]}
        for name in _SCRIPTS:
            found, refused = f"{100 * sides[name]['hit_rate']:.1f} %", sides[name]["refused"]
            yield f"{100 * share:g} %", name.removesuffix(", lru"), found, f"{refused:,}"


#: A drive of today's; what a load waits for it is calculated.
_DRIVE_BYTES_S: Final = 7e9


def _load_parts(results: Results) -> Rows:
    found = {
        tuple(row[key] for key in ("bytes", "way", "cache", "place")): row
        for row in results["rows"]
    }
    for size_bytes, way, cache, place in found:
        if place != "XFS":
            continue
        xfs, kvfs, daemon = (
            found[size_bytes, way, cache, name] for name in ("XFS", "kvfs", "kvfs, daemon path")
        )
        spent_s, drive_s = kvfs["client_s"], size_bytes / _DRIVE_BYTES_S
        yield (
            format_size(size_bytes),
            f"{way}, {cache}",
            f"{1e3 * xfs['client_s']:.2f}",
            *(
                f"{1e3 * row['client_s']:.2f} + {1e3 * row['server_s']:.2f}"
                for row in (kvfs, daemon)
            ),
            f"{100 * spent_s / (spent_s + drive_s):.0f} %" if cache == "cold" else "",
        )


#: Folders from the kernel's side to values, each a layer.
_LAYERS: Final = (
    *("mount/fuse", "mount/requests", "mount/files"),
    *("kvfs/engine", "kvfs/pool", "kvfs/machine", "kvfs/storage", "kvfs/core"),
)
#: The requests whose files are shown.
_WIDE: Final = ("CREATE", "RELEASE that publishes", "RENAME", "eviction of one block")


def _touched(results: Results) -> Rows:
    for name, one in results["requests"].items():
        once = sum(calls == 1 for calls in one["calls_in"].values())
        yield name, *(str(one[key]) for key in ("calls", "files", "crossings")), str(once)


def _layer_of(file: str) -> str:
    return "/".join(file.split("/")[:2])


def _touched_layers(results: Results) -> Rows:
    for layer in _LAYERS:
        cells = []
        for name in _WIDE:
            each = results["requests"][name]["calls_in"].items()
            there = [calls for file, calls in each if _layer_of(file) == layer]
            cells.append(f"{sum(there)} / {len(there)}" if there else "")
        yield f"`{layer}`", *cells


def _touched_files(results: Results) -> Rows:
    each = [results["requests"][name]["calls_in"] for name in _WIDE]
    files = {file for calls_in in each for file in calls_in}
    for file in sorted(files, key=lambda file: (_LAYERS.index(_layer_of(file)), file)):
        yield f"`{file}`", *(str(calls_in.get(file, "")) for calls_in in each)


_PATH: Final = "docs/dev/request-path.md"
_TOKENS_HEAD: Final = "| tokens | state | computed | XFS, cold "
TABLES: Final = (
    MeasuredTable(_PERFORMANCE, "## Results", "| job | XFS | kvfs ", "compare", _jobs),
    MeasuredTable(_PERFORMANCE, "## Results", "| the server ", "compare", _server),
    MeasuredTable(_PERFORMANCE, "A full pool, `measure", "| 4 MiB blocks ", "full-4m", _full),
    MeasuredTable(_PERFORMANCE, "A full pool, `measure", "| 32 MiB blocks ", "full-32m", _full),
    MeasuredTable(
        _PERFORMANCE, "Devices in memory, data path pass", _TOKENS_HEAD, "first-token", _tokens
    ),
    MeasuredTable(
        _PERFORMANCE, "The same on the machine's disk", _TOKENS_HEAD, "first-token-disk", _tokens
    ),
    MeasuredTable(
        _PERFORMANCE, "in memory, without passthr", _TOKENS_HEAD, "first-token-daemon", _tokens
    ),
    MeasuredTable(
        _PERFORMANCE, "On the 16 cores of the same", _TOKENS_HEAD, "first-token-cpu", _tokens
    ),
    MeasuredTable(
        _PERFORMANCE, "## What a load spends", "| block | way ", "load-parts", _load_parts
    ),
    MeasuredTable(_PERFORMANCE, "### The recorded trace", "| cache | side ", "replay", _replayed),
    MeasuredTable(_PATH, "# What a request touches", "| one request ", "path", _touched),
    MeasuredTable(_PATH, "## By layer", "| layer ", "path", _touched_layers),
    MeasuredTable(_PATH, "## File by file", "| file ", "path", _touched_files),
    MeasuredTable(_README, "**What it brings.**", "| prompt ", "first-token", _tokens_in_short),
    MeasuredTable(_README, "**What a script loses.**", "| room", "replay", _replayed_in_short),
)


def with_table(text: str, table: MeasuredTable, results: Results) -> str:
    """Return the page *text* with the rows of *table* made from *results*. Raises ValueError."""
    below = text.find(table.below)
    place = re.compile(rf"^{re.escape(table.head)}.*\n\|[-|]+\|\n((?:\|.*\n)+)", re.MULTILINE)
    if below < 0 or not (found := place.search(text, below)):
        raise ValueError(f"{table.page}: no table {table.head!r} below {table.below!r}")
    # An empty cell is one space wide.
    rows = ("| " + " | ".join(row).replace("|  |", "| |") + " |\n" for row in table.rows(results))
    made = "".join(re.sub(r"\|  (?=\|)", "| ", row) for row in rows)
    return text[: found.start(1)] + made + text[found.end(1) :]


def made_pages() -> dict[str, str]:
    """Return the text of each page that has such tables."""
    texts = {table.page: (ROOT / table.page).read_text() for table in TABLES}
    for table in TABLES:
        texts[table.page] = with_table(texts[table.page], table, read_run(table.run).results)
    return texts


def commits_since(run: Run) -> int | None:
    """Return how many commits have changed what *run* measures; None without the history."""
    asked = ["git", "rev-list", "--count", f"{run.commit}..HEAD", "--", *run.measures]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else None


def keep(name: str, output: Path) -> None:
    """Take the JSON *output* of the command of *name* as its run at this commit."""
    run = read_run(name)
    asked = ["git", "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"]
    commit = subprocess.check_output(asked, cwd=ROOT, text=True).strip()
    told = run._asdict() | {"commit": commit, "results": kept_of(json.loads(output.read_text()))}
    del told["name"]
    (PLACE / f"{name}.json").write_text(json.dumps(told, indent=1) + "\n")


def kept_of(results: Any) -> Any:  # noqa: ANN401
    """Return *results* without single samples."""
    if isinstance(results, dict):
        if "sides" in results and "full_to_xfs_rate" in results:
            results = {**results, "medians": _medians(results["sides"])}
            del results["sides"]
        return {key: kept_of(each) for key, each in results.items() if key not in _NOT_KEPT}
    return [kept_of(each) for each in results] if isinstance(results, list) else results


def _medians(sides: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    keys = ("rate_bytes_s", "p50_us", "p99_us")
    return {
        name: {key: statistics.median(each[key] for each in rounds) for key in keys}
        for name, rounds in sides.items()
    }


if __name__ == "__main__":
    if len(sys.argv) == 3:
        keep(sys.argv[1], Path(sys.argv[2]))
    for page, text in made_pages().items():
        (ROOT / page).write_text(text)
    for run in runs():
        print(f"{run.name:20} {run.commit:10} {commits_since(run)} commits since")
