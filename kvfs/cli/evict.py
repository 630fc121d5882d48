"""``kvfs evict``: evict blocks now, not only when their space is needed."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any, Final

from kvfs.cli.arguments import add_match, locate, nothing_matches, size_of
from kvfs.cli.follow import follow, reasons
from kvfs.cli.parser import add_verb
from kvfs.core.errors import EvictedTooLittle, UsageError
from kvfs.core.sizes import count_of, format_size, parse_age

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers

#: The reason of blocks that --unused-for leaves out; that they stay is no failure.
_WANTED: Final = "used since"


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "evict",
        run,
        description="Evict the blocks at PATHs and below them. With --match only what matches; "
        "with --bytes only that much, least\nrecently used first; with --unused-for only blocks "
        "whose last use (store, lookup, open, utime) is longer ago.\nPinned and leased blocks, "
        "slabs and blocks being written stay; the answer has number and bytes of each. A block\n"
        "that is being read loses its name at once and its space after the last reader; --bytes "
        "leaves it alone, and evicts nothing if less than that may go.\nEnds with exit code 20 if "
        "nothing matches, and with 21 if nothing could be evicted, or less than --bytes.",
        example="kvfs evict /kv --bytes 100G\n  kvfs evict /kv --match '*Llama-3.1-8B@*' --dry-run"
        "\n  kvfs evict /kv/lmcache --unused-for 7d",
    )
    parser.add_argument("paths", metavar="PATH", nargs="+")
    add_match(parser)
    parser.add_argument("--bytes", metavar="SIZE", help="how much to evict, e.g. 100G")
    parser.add_argument("--unused-for", metavar="AGE", help="e.g. 90s, 15m, 12h, 7d, 2w")
    parser.add_argument("--dry-run", action="store_true", help="evict nothing; show what would be")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Start the eviction, follow it, and print the result."""
    size_bytes = size_of(args.bytes, "--bytes")
    order = {
        "bytes": size_bytes,
        "match": args.match,
        "unused_for_s": age_of(args.unused_for),
        "dry_run": args.dry_run,
    }
    where = locate(args.paths)
    done = follow(where, "evict", order, _shown, quiet=args.json)
    kept = sum(done["kept"].values())
    if args.json:
        print(json.dumps({"mountpoint": where.mountpoint, **done}, indent=2))
    else:
        what = "would be evicted" if args.dry_run else "evicted"
        blocks = count_of(done["blocks"], "block")
        print(f"{blocks}, {format_size(done['bytes'])} {what}", end="")
        print(f"; {kept:,} stay: {reasons(done)}" if kept else "")
    if args.match is not None and not done["looked_at"]:
        raise nothing_matches(args)
    if size_bytes is not None and done["bytes"] < size_bytes:
        sys.stdout.flush()
        stays = "the rest is pinned, leased or in use" + (f" ({reasons(done)})" if kept else "")
        if done["found_bytes"] and not done["bytes"]:
            raise EvictedTooLittle(
                f"nothing {'would be evicted' if args.dry_run else 'evicted'}: of "
                f"{format_size(size_bytes)} only {format_size(done['found_bytes'])} may go: {stays}"
            )
        raise EvictedTooLittle(
            f"{'would evict' if args.dry_run else 'evicted'} {format_size(done['bytes'])} of "
            f"{format_size(size_bytes)}: {stays}"
        )
    if kept > done["kept"].get(_WANTED, 0) and not done["blocks"]:
        sys.stdout.flush()
        raise EvictedTooLittle(f"nothing under {', '.join(args.paths)} can be evicted")
    return 0


def age_of(text: str | None) -> float | None:
    """Return the seconds of an age such as ``7d``. Raises UsageError."""
    try:
        return None if text is None else parse_age(text)
    except ValueError as error:
        raise UsageError(f"--unused-for: {error}") from None


def _shown(state: dict[str, Any], order: dict[str, Any]) -> tuple[str, int, int | None]:
    """Return the text of the progress bar, how much is done, and out of how much."""
    goal = min(order["bytes"] or state["found_bytes"], state["found_bytes"])
    text = f"checked {state['looked_at']:,}, evicted {state['blocks']:,}"
    return text, state["bytes"], goal if state["blocks"] else None
