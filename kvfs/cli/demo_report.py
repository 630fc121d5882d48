"""What ``kvfs demo`` prints of its KV-shaped load: rates, and their ratios to a plain directory."""

from typing import TYPE_CHECKING, Any

from kvfs.core.sizes import format_size

if TYPE_CHECKING:
    from rich.table import Table

    from kvfs.bench.kv_load import KvLoad, Moved, ShapeCounts
    from kvfs.bench.kv_shapes import KvShape

_WAYS = ("stored", "loaded", "direct")


def as_table(load: "KvLoad", plain: "KvLoad | None") -> "Table":
    """Return a row for each shape and the sum; rates are of all threads, without the checks.

    With *plain*, the same load on a plain directory, each rate is followed by its ratio to that.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    ratios = "; x: times the plain directory's" if plain else ""
    table = Table(
        title=f"KV blocks, {load.report.threads} threads",
        caption=f"GB/s while bytes move, without the checks{ratios}\n"
        "direct: loaded with O_DIRECT; the others go through the page cache",
        show_footer=True,
        box=SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    total = load.report.total()
    table.add_column("model", "all", no_wrap=True)
    table.add_column("names of")
    table.add_column("bytes", justify="right")
    table.add_column("blocks", str(total.blocks), justify="right")
    for way, foot in zip(
        _WAYS, _rates(total, plain.report.total() if plain else None), strict=True
    ):
        table.add_column(f"{way}\nGB/s", foot, justify="right", no_wrap=True)
    for shape, tally in load.report.tallies.items():
        beside = plain.report.tallies[shape] if plain else None
        row = (shape.model, shape.layout.value, f"{shape.size_bytes:,}", str(tally.blocks))
        table.add_row(*row, *_rates(tally, beside))
    return table


def in_words(load: "KvLoad") -> str:
    """Return what the load found, as a sentence."""
    total = load.report.total()
    return (
        f"{format_size(total.verified_bytes)} were read back, and every byte is as stored. "
        f"{total.misses:,} lookups\nof blocks that were never stored found nothing."
    )


def as_json(load: "KvLoad", plain: "KvLoad | None") -> dict[str, Any]:
    """Return the same as numbers; rates are in GB/s, 0 if nothing was moved.

    A ratio is null if there is no plain directory, or nothing was moved that way.
    """
    beside = plain.report if plain else None
    return {
        "threads": load.report.threads,
        "total": _numbers(load.report.total(), beside.total() if beside else None),
        "shapes": [
            {
                "shape": shape.title,
                "block_bytes": shape.size_bytes,
                **_numbers(tally, _of(shape, beside.tallies if beside else None)),
            }
            for shape, tally in load.report.tallies.items()
        ],
    }


def _of(shape: "KvShape", tallies: "dict[KvShape, ShapeCounts] | None") -> "ShapeCounts | None":
    return tallies[shape] if tallies else None


def _numbers(tally: "ShapeCounts", plain: "ShapeCounts | None") -> dict[str, Any]:
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
        "to_plain": {way: _ratio(getattr(tally, way), plain, way) for way in _WAYS},
    }


def _ratio(moved: "Moved", plain: "ShapeCounts | None", way: str) -> float | None:
    beside = getattr(plain, way).rate() if plain else 0.0
    return round(moved.rate() / beside, 3) if beside and moved.bytes else None


def _rates(tally: "ShapeCounts", plain: "ShapeCounts | None") -> list[str]:
    """Return the rate of each way as text, with the ratio if there is one."""
    shown = []
    for way in _WAYS:
        moved: Moved = getattr(tally, way)
        ratio = _ratio(moved, plain, way)
        rate = f"{moved.rate():.2f}" if moved.bytes else "-"
        shown.append(rate if ratio is None else f"{rate} {ratio:.2f}x")
    return shown
