"""What a load did, as a table for a person and as JSON for a script."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvfs.bench.kv_load import KvLoad, Moved, ShapeCounts


def as_table(load: KvLoad) -> Table:
    """Return a row for each shape and the sum; rates are of all threads, without the checks."""
    table = Table(
        title=f"KV blocks, {load.report.threads} threads",
        caption="GB/s while bytes move, without the checks; direct: loaded with O_DIRECT",
        show_footer=True,
        box=SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    total = load.report.total()
    table.add_column("model", "all", no_wrap=True)
    table.add_column("names of")
    numbers = {
        "bytes": "",
        "blocks": str(total.blocks),
        "stored\nGB/s": _rate(total.stored),
        "loaded\nGB/s": _rate(total.loaded),
        "direct\nGB/s": _rate(total.direct),
        "hits": str(total.hits),
        "misses": str(total.misses),
    }
    for head, foot in numbers.items():
        table.add_column(head, foot, justify="right")
    for shape, tally in load.report.tallies.items():
        table.add_row(
            shape.model,
            shape.layout.value,
            f"{shape.size_bytes:,}",
            str(tally.blocks),
            _rate(tally.stored),
            _rate(tally.loaded),
            _rate(tally.direct),
            str(tally.hits),
            str(tally.misses),
        )
    return table


def as_json(load: KvLoad) -> dict[str, Any]:
    """Return the same as numbers; rates are in GB/s, 0 if nothing was moved."""
    return {
        "threads": load.report.threads,
        "total": _numbers(load.report.total()),
        "shapes": [
            {"shape": shape.title, "block_bytes": shape.size_bytes, **_numbers(tally)}
            for shape, tally in load.report.tallies.items()
        ],
    }


def _numbers(tally: ShapeCounts) -> dict[str, Any]:
    return {
        "blocks": tally.blocks,
        "hits": tally.hits,
        "misses": tally.misses,
        "stored_bytes": tally.stored.bytes,
        "loaded_bytes": tally.loaded.bytes + tally.direct.bytes,
        "verified_bytes": tally.verified_bytes,
        "store_gb_s": round(tally.stored.rate(), 3),
        "load_gb_s": round(tally.loaded.rate(), 3),
        "load_direct_gb_s": round(tally.direct.rate(), 3),
    }


def _rate(moved: Moved) -> str:
    return f"{moved.rate():.2f}" if moved.bytes else "-"
