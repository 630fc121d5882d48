"""The results of a replay as a table and as JSON; docs/performance.md has the keys. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from rich import box
from rich.table import Table

from kvfs.bench.replay.first_token import Model
from kvfs.bench.replay.run import HALF_WRITERS, Percentiles, SideResult, percentiles
from kvfs.bench.replay.trace import Request, footprint
from kvfs.core.sizes import format_size

#: Goes up when a key changes its meaning or is removed.
REPORT_FORMAT: Final = 1
#: Hit rates that differ by less than half of it are shown as equal.
_POINT: Final = 0.001
#: From here on a time is shown in ms, so that the table keeps its width.
_LONG_S: Final = 0.01


class TraceFacts(NamedTuple):
    """What the trace itself says: its size, and what no cache could do better or worse."""

    requests: int
    blocks: int
    accesses: int
    #: Share of the accesses that a cache without bounds finds.
    best_hit_rate: float
    #: Time to the first token if nothing is ever found.
    computed_s: Percentiles


class Round(NamedTuple):
    """One size of the cache, and what each side did with it."""

    share: float
    block_bytes: int
    room_bytes: int
    sides: list[SideResult]


def facts_of(requests: Sequence[Request], model: Model) -> TraceFacts:
    """Return what follows from *requests* alone, by *model*."""
    seen: set[int] = set()
    found = 0
    for request in requests:
        found += next(
            (n for n, b in enumerate(request.blocks) if b not in seen), len(request.blocks)
        )
        seen.update(request.blocks)
    accesses = sum(len(request.blocks) for request in requests)
    return TraceFacts(
        requests=len(requests),
        blocks=footprint(requests),
        accesses=accesses,
        best_hit_rate=found / accesses,
        computed_s=percentiles([model.prefill_s(request.tokens) for request in requests]),
    )


def round_table(each: Round, facts: TraceFacts) -> Table:
    """Return a table with two lines for each side, and one for a machine without a cache.

    It fits 80 columns.
    """
    table = Table(
        title=f"{each.share:.3g} % of {facts.blocks:,} blocks of {format_size(each.block_bytes)}: "
        f"room for {format_size(each.room_bytes)}",
        caption=f"The best hit rate of any cache is {100 * facts.best_hit_rate:.1f} %. The time to "
        "the first token is by the model.",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        show_lines=True,
        padding=0,
    )
    table.add_column("", no_wrap=True)
    for heading in (
        "hit rate",
        "load p50\np99",
        "store p50\np99",
        "first\ntoken",
        "written",
        "CPU server\nclients",
        "refused\nlost",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for side in each.sides:
        tally = side.tally
        table.add_row(
            side.name.replace(", cleaned ", "\n").replace(", ", "\n"),
            f"{100 * tally.hit_rate:.2f} %",
            _both(side.load_s),
            _both(side.store_s),
            f"{side.first_token_s.mean:.3f} s",
            "-" if side.written_bytes is None else f"{side.written_bytes / 1e9:.2f} GB",
            f"{side.server_cpu_s:.1f} s\n{side.clients_cpu_s:.1f} s",
            f"{tally.refused:,}\n{tally.lost:,}",
        )
    table.add_row("no cache", "0 %", "", "", f"{facts.computed_s.mean:.3f} s", "", "", "")
    return table


def in_words(each: Round) -> Iterator[str]:
    """Yield a sentence for each side: what it found, and what it cost an engine otherwise."""
    best = max(side.tally.hit_rate for side in each.sides)
    for side in each.sides:
        tally = side.tally
        rate = f"{100 * tally.hit_rate:.1f} % found"
        if best - tally.hit_rate >= _POINT / 2:
            rate += f" ({100 * (best - tally.hit_rate):.1f} points below the best)"
        stores = tally.stored + tally.refused
        parts = [
            rate,
            f"{tally.refused:,} of {stores:,} stores refused (ENOSPC)"
            if tally.refused
            else "no store refused",
            f"{tally.lost:,} loads lost: the block went after its lookup"
            if tally.lost
            else "no load lost",
            f"{side.halves_left} half blocks of {HALF_WRITERS} killed writers"
            if side.halves_left
            else f"no half block of {HALF_WRITERS} killed writers",
        ]
        yield f"{side.name}: {', '.join(parts)}."


def _both(times_s: Percentiles) -> str:
    return f"{_time(times_s.p50)}\n{_time(times_s.p99)}"


def _time(time_s: float) -> str:
    return f"{1e6 * time_s:.0f} us" if time_s < _LONG_S else f"{1e3 * time_s:.1f} ms"


def build_report(
    rounds: Sequence[Round], facts: TraceFacts, model: Model, setting: dict[str, Any]
) -> dict[str, Any]:
    """Return everything measured; *setting* says where and how."""
    return {
        "format": REPORT_FORMAT,
        **setting,
        "model": model._asdict(),
        "trace": {**facts._asdict(), "computed_s": facts.computed_s._asdict()},
        "rounds": [
            {
                "blocks_share": each.share / 100,
                "block_bytes": each.block_bytes,
                "room_bytes": each.room_bytes,
                "sides": [_side(side) for side in each.sides],
            }
            for each in rounds
        ],
    }


def _side(side: SideResult) -> dict[str, Any]:
    tally = side.tally
    return {
        "name": side.name,
        "hit_rate": tally.hit_rate,
        "asked": tally.asked,
        "hits": tally.hits,
        "present": tally.present,
        "stored": tally.stored,
        "refused": tally.refused,
        "lost": tally.lost,
        "deleted": side.deleted,
        "load_s": side.load_s._asdict(),
        "store_s": side.store_s._asdict(),
        "first_token_s": side.first_token_s._asdict(),
        "written_bytes": side.written_bytes,
        "server_cpu_s": side.server_cpu_s,
        "clients_cpu_s": side.clients_cpu_s,
        "elapsed_s": side.elapsed_s,
        "halves_left": side.halves_left,
    }
