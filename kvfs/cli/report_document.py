"""The document of ``kvfs report``: one HTML file that needs no network and no script.

Any user who stores a file chooses its name, so all names are escaped. The document is well-formed
XML, too, which keeps a mistake from hiding in it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any, Final, NamedTuple

from kvfs.cli.report_drawings import STYLE, Line, ages, lines_over, share_bar
from kvfs.cli.tables import shown_time
from kvfs.core.shown_names import printable
from kvfs.core.sizes import count_of, format_size, shown_rate

#: Rows of a table; the rest is counted below it.
_ROWS_MAX: Final = 12
_PERCENTS: Final = ("0 %", "25 %", "50 %", "75 %", "100 %")
#: Nothing is loaded from anywhere, whatever a name may say.
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"


class ReportFacts(NamedTuple):
    """What a report is made of, JSON-ready: what the server and `kvfs doctor` say."""

    status: Mapping[str, Any]
    history: Mapping[str, Any]
    findings: Sequence[Mapping[str, Any]]
    health: str
    host: str
    made: str
    """When, in words."""
    worn_out: str
    """When the drive will be, in words; empty if that is not known."""


def document(facts: ReportFacts) -> str:
    """Return the whole document."""
    name = _shown(facts.status["mountpoint"])
    cards = "\n".join(card for card in _cards(facts) if card)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta http-equiv="Content-Security-Policy" content="{_POLICY}"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>kvfs report: {name}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>{name}</h1>
<p class="soft">{_shown(facts.status["source"])} on {_shown(facts.host)}, kvfs
{_shown(facts.status["version"])}, {escape(facts.made)}. Figures without another time are since the
server's start, {shown_time(facts.status["cache"]["uptime_s"])} ago.</p>
</header>
<main>
<div class="tiles">{"".join(_tiles(facts))}</div>
<div class="cards">
{cards}
</div>
</main>
</body>
</html>
"""


def _tiles(facts: ReportFacts) -> Iterator[str]:
    status, cache = facts.status, facts.status["cache"]
    used, capacity = format_size(status["used_bytes"]), format_size(status["capacity_bytes"])
    evicted = sum(each["bytes"] for each in cache["evicted"].values())
    found = count_of(len(facts.findings), "finding")
    for what, much, more in (
        ("hit rate", shown_rate(cache["hit_rate"]), f"{cache['hits']:,} hits"),
        ("used", used, f"of {capacity}, {status['blocks']:,} blocks"),
        ("loaded", format_size(cache["loaded_bytes"]), "blocks that were opened"),
        ("stored", format_size(cache["stored_bytes"]), f"{cache['stored_blocks']:,} blocks"),
        ("evicted", format_size(evicted), "to make room, or by rules"),
        ("health", facts.health, f"{found} of kvfs doctor"),
    ):
        good = " good" if facts.health == "ok" else " bad"
        style = good if what == "health" else ""
        yield (
            f'<div class="tile"><span class="soft">{what}</span>'
            f'<b class="value{style}">{escape(much)}</b>'
            f'<span class="soft">{escape(more)}</span></div>'
        )


def _cards(facts: ReportFacts) -> Iterator[str]:
    yield _findings(facts.findings)
    yield from _day(facts.history)
    yield _curve(facts.status["cache"])
    yield _ages(facts.status["cache"])
    cache = facts.status["cache"]
    yield _tallies("directory", cache["directories"], "A tenant is told by its directory.")
    yield _tallies("model", cache["models"], "Told by the names that connectors give.")
    yield _card("Durability", _pairs(_durability(facts.status)))
    yield _card("Server", _pairs(_server(facts.status)))
    yield _card("Drive", _pairs(_drive(facts)))


def _card(heading: str, body: str, *, wide: bool = False) -> str:
    style = "card wide" if wide else "card"
    return f'<section class="{style}"><h2>{escape(heading)}</h2>{body}</section>'


def _findings(findings: Sequence[Mapping[str, Any]]) -> str:
    if not findings:
        return _card("Findings of kvfs doctor", '<p class="good">None.</p>', wide=True)
    told = "".join(
        f'<li><b class="bad">{escape(one["severity"])}</b> {_shown(one["check"])}: '
        f"{_shown(one['problem'])}{_fix(one['fix'])}</li>"
        for one in findings
    )
    return _card("Findings of kvfs doctor", f"<ul>{told}</ul>", wide=True)


def _fix(text: str) -> str:
    """Return the command that helps, and below it what else is needed."""
    command, *remarks = map(_shown, text.splitlines())
    below = "".join(f'<br/><span class="soft">{remark}</span>' for remark in remarks)
    return f"<br/><code>{command}</code>{below}"


def _day(history: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the server remembers of the last day."""
    samples = history.get("samples", [])
    if len(samples) < 2:
        why = "The server keeps no history: it is older, or history_step_s is 0."
        if step_s := history.get("step_s"):
            why = f"A sample is taken every {shown_time(step_s)}: there is nothing to draw yet."
        yield _card("Over the last day", f'<p class="soft">{why}</p>')
        return
    pairs = list(pairwise(samples))
    last_s, span_s = samples[-1]["time_s"], samples[-1]["time_s"] - samples[0]["time_s"]
    marks = {0.0: f"{shown_time(span_s)} ago", 1.0: "now"}

    def at(sample: Mapping[str, float]) -> float:
        return 1 - (last_s - sample["time_s"]) / span_s if span_s else 1.0

    rates = [(at(later), _hit_rate(before, later)) for before, later in pairs]
    known = [rate for _, rate in rates if rate is not None]
    said = (
        f"between {shown_rate(min(known))} and {shown_rate(max(known))}" if known else "no request"
    )
    yield _card(
        "Hit rate over the last day",
        lines_over(
            [Line("one", rates)],
            title=f"Hit rate over the last {shown_time(span_s)}: {said}",
            top=1.0,
            y_marks=_PERCENTS,
            x_marks=marks,
        )
        + f'<p class="soft">{escape(said)}, in steps of {shown_time(history["step_s"])}</p>',
    )
    moved = {
        key: [(at(later), _speed(before, later, f"{key}_bytes")) for before, later in pairs]
        for key in ("loaded", "stored")
    }
    top = max(1.0, *(speed for points in moved.values() for _, speed in points))
    most = [format_size(int(top * part / 4)) for part in range(5)]
    yield _card(
        "Bytes a second over the last day",
        lines_over(
            [Line("one", moved["loaded"]), Line("two", moved["stored"])],
            title=f"Bytes loaded and stored a second; at most {most[-1]}",
            top=top,
            y_marks=("0", "", "", "", ""),
            x_marks=marks,
        )
        + f'<p class="soft"><span class="key"></span>loaded <span class="key two"></span>stored; '
        f"the upper edge is {escape(most[-1])} a second</p>",
    )


def _hit_rate(before: Mapping[str, float], later: Mapping[str, float]) -> float | None:
    hits, misses = (max(0.0, later[name] - before[name]) for name in ("hits", "misses"))
    return hits / (hits + misses) if hits + misses else None


def _speed(before: Mapping[str, float], later: Mapping[str, float], name: str) -> float:
    passed_s = later["time_s"] - before["time_s"]
    return max(0.0, later[name] - before[name]) / passed_s if passed_s > 0 else 0.0


def _curve(cache: Mapping[str, Any]) -> str:
    points = cache.get("curve") or []
    if not points:
        return _card("Hit rate at other sizes", '<p class="soft">Nothing was asked for yet.</p>')
    last = len(points) - 1
    placed = [
        (number / last if last else 0.5, one["hit_rate"]) for number, one in enumerate(points)
    ]
    marks = {x: f"{one['factor']:g} x" for (x, _), one in zip(placed, points, strict=True)}
    said = ", ".join(f"{one['factor']:g} x: {shown_rate(one['hit_rate'])}" for one in points)
    rows = [
        (f"{one['factor']:g} x", format_size(one["capacity_bytes"]), shown_rate(one["hit_rate"]))
        for one in points
    ]
    drawn = lines_over(
        [Line("one", placed)],
        title=f"Hit rate of pools of other sizes: {said}",
        top=1.0,
        y_marks=_PERCENTS,
        x_marks=marks,
        dots=True,
    )
    note = '<p class="soft">Estimated from a sample of the names, for the same requests.</p>'
    return _card(
        "Hit rate at other sizes",
        drawn + _table(("size", "capacity", "hit rate"), rows, numbers=(1, 2)) + note,
    )


def _ages(cache: Mapping[str, Any]) -> str:
    named = (
        ("unused when evicted", cache.get("age_at_eviction") or {}),
        ("missed again after its eviction", cache.get("missed_after_eviction") or {}),
    )
    keys = ("p10_s", "p50_s", "p90_s")
    rows = [(name, *(shown_time(each.get(key)) for key in keys)) for name, each in named]
    table = _table(("", "a tenth", "half", "nine tenths"), rows, numbers=(1, 2, 3))
    drawn = ages(named) if any(each.get("p50_s") is not None for _, each in named) else ""
    return _card("Ages of blocks", drawn + table)


def _tallies(what: str, tallies: Mapping[str, Mapping[str, Any]], note: str) -> str:
    """Return the busiest directories or models; empty if none is known."""
    if not tallies:
        return ""
    busiest = sorted(tallies.items(), key=lambda row: (-row[1]["hits"] - row[1]["misses"], row[0]))
    rows = [
        (
            _shown(name),
            f"{share_bar(each['hit_rate'])} {shown_rate(each['hit_rate'])}",
            f"{each['hits']:,}",
            f"{each['misses']:,}",
            format_size(each["loaded_bytes"]),
            format_size(each["stored_bytes"]),
            format_size(each["evicted_bytes"]),
        )
        for name, each in busiest[:_ROWS_MAX]
    ]
    heads = (what, "hit rate", "hits", "misses", "loaded", "stored", "evicted")
    more = len(busiest) - len(rows)
    others = f"And {more} more. " if more > 0 else ""
    rest = f'<p class="soft">{others}{note}</p>'
    table = _table(heads, rows, numbers=range(1, len(heads)))
    return _card(f"By {what}", table + rest, wide=True)


def _durability(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    told = status.get("durability") or {}
    yield "a power loss takes", f"what was stored within {shown_time(told.get('within_s'))}"
    yield (
        "not durable yet",
        f"{told.get('blocks', 0):,} blocks, {format_size(told.get('bytes', 0))}",
    )
    yield "the oldest of them waits for", shown_time(told.get("oldest_s"))
    yield "later than that window", f"{told.get('late', 0):,} blocks"
    yield "failures of the device", f"{told.get('failures', 0):,}"
    lost, torn = (status.get(name) or 0 for name in ("lost_blocks", "torn_blocks"))
    yield "blocks lost by the device, torn by killed writers", f"{lost:,}, {torn:,}"


def _server(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "restarts, upgrades", f"{status.get('restarts', 0):,}, {status.get('upgrades', 0):,}"
    yield "longest pause", shown_time(status.get("longest_pause_s"))
    yield "take-over if it dies", str(status.get("takeover", "-"))
    yield "data path", f"{status['data_path']}: {status['data_path_reason']}"
    yield "CPU time", shown_time(status.get("server_cpu_s"))
    yield "memory", format_size(status.get("server_memory_bytes") or 0)
    index_bytes = (status.get("index_memory") or {}).get("bytes")
    yield "index in memory", "-" if index_bytes is None else format_size(index_bytes)


def _drive(facts: ReportFacts) -> Iterator[tuple[str, str]]:
    device = facts.status["cache"].get("device") or {}
    written, rate = device.get("written_bytes"), device.get("write_rate")
    yield "state", str(facts.status.get("device_state", "-"))
    yield "written since the machine's start", "-" if written is None else format_size(written)
    yield "written now", "-" if rate is None else f"{format_size(int(rate))} a second"
    yield "endurance left", shown_rate(device.get("endurance_left"))
    yield "worn out", facts.worn_out or "not known; see kvfs report --help, --endurance"


def _pairs(rows: Iterable[tuple[str, str]]) -> str:
    return _table((), [(escape(what), _shown(much)) for what, much in rows])


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Return a table; its cells are HTML already. *numbers* are the columns of figures."""

    def style(column: int) -> str:
        return ' class="number"' if column in numbers else ' class="name"' if not column else ""

    head = "".join(f'<th scope="col"{style(n)}>{escape(one)}</th>' for n, one in enumerate(heads))
    body = "".join(
        "<tr>" + "".join(f"<td{style(n)}>{cell}</td>" for n, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    above = f"<thead><tr>{head}</tr></thead>" if heads else ""
    return f'<div class="scrolls"><table>{above}<tbody>{body}</tbody></table></div>'


def _shown(text: object) -> str:
    return escape(printable(str(text)))
