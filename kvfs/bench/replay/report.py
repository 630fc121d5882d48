"""The results of a replay as a table and as JSON; docs/performance.md has the keys. Pure."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from rich import box
from rich.table import Table

from kvfs.bench.replay.first_token import Model
from kvfs.bench.replay.run import Percentiles, SideResult, percentiles
from kvfs.bench.replay.trace import Request, footprint
from kvfs.core.sizes import format_size

#: Goes up when a key changes its meaning or is removed.
REPORT_FORMAT: Final = 1


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
    """Return a table with two lines for each side, and one for a machine without a cache."""
    table = Table(
        title=f"{each.share:.3g} % of {facts.blocks:,} blocks of {format_size(each.block_bytes)}: "
        f"room for {format_size(each.room_bytes)}",
        caption=f"The best hit rate of any cache is {100 * facts.best_hit_rate:.1f} %. Lost: a "
        "block went between lookup and load.",
        box=box.SIMPLE_HEAD,
        show_lines=True,
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    table.add_column("", no_wrap=True)
    for heading in (
        "hit rate",
        "load p50\np99",
        "store p50\np99",
        "first token\nby the model",
        "written",
        "CPU: server\nclients",
        "refused\nlost",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for side in each.sides:
        tally = side.tally
        table.add_row(
            side.name.replace(", ", "\n"),
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


def _both(times_s: Percentiles) -> str:
    return f"{1e6 * times_s.p50:.0f} us\n{1e6 * times_s.p99:.0f} us"


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
    }
