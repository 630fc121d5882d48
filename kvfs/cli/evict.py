"""``kvfs evict``: evict blocks now, not only when their space is needed."""

import argparse
import json
import re
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from kvfs.cli.arguments import OnMount, locate, size_of
from kvfs.cli.parser import add_verb
from kvfs.client.control_socket import ask
from kvfs.core.errors import EvictedTooLittle, UsageError
from kvfs.core.sizes import count_of, format_size

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers

#: Time between two questions to the server about its progress.
_ASK_S: Final = 0.05
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "evict",
        run,
        description="Evict the blocks at PATHs and below them. With --bytes only that much, "
        "least recently used first;\nwith --older-than only blocks whose last use (store, lookup, "
        "open, utime) is longer ago.\nPinned and leased blocks, slabs and blocks being written "
        "stay. A block that is being read loses its name at once and\nits space after the last "
        "reader; --bytes leaves it alone. Ends with exit code 21 when nothing could be evicted, or "
        "less\nthan --bytes.",
        example="kvfs evict /kv --bytes 100G\n  kvfs evict /kv/lmcache --older-than 7d --dry-run",
    )
    parser.add_argument("paths", metavar="PATH", nargs="+")
    parser.add_argument("--bytes", metavar="SIZE", help="how much to evict, e.g. 100G")
    parser.add_argument("--older-than", metavar="AGE", help="e.g. 90s, 15m, 12h, 7d, 2w")
    parser.add_argument("--dry-run", action="store_true", help="evict nothing; show what would be")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Start the eviction, follow it, and print the result."""
    size_bytes = size_of(args.bytes, "--bytes")
    order = {
        "bytes": size_bytes,
        "older_than_s": age_of(args.older_than),
        "dry_run": args.dry_run,
    }
    where = locate(args.paths)
    done = _follow(where, order, quiet=args.json)
    kept = sum(done["kept"].values())
    if args.json:
        print(json.dumps({"mountpoint": where.mountpoint, **done}, indent=2))
    else:
        what = "would be evicted" if args.dry_run else "evicted"
        blocks = count_of(done["blocks"], "block")
        print(f"{blocks}, {format_size(done['bytes'])} {what}", end="")
        print(f"; {kept:,} stay: {_reasons(done)}" if kept else "")
    if size_bytes is not None and done["bytes"] < size_bytes:
        sys.stdout.flush()
        raise EvictedTooLittle(
            f"{'would evict' if args.dry_run else 'evicted'} {format_size(done['bytes'])} of "
            f"{format_size(size_bytes)}: "
            "the rest is pinned, leased or in use" + (f" ({_reasons(done)})" if kept else "")
        )
    if kept and not done["blocks"]:
        sys.stdout.flush()
        raise EvictedTooLittle(f"nothing under {', '.join(args.paths)} can be evicted")
    return 0


def _reasons(done: dict[str, Any]) -> str:
    """Return why blocks stay, with number and size: ``leased 30 (300 MiB)``."""
    sizes = done.get("kept_bytes", {})
    return ", ".join(
        f"{why} {count:,} ({format_size(sizes.get(why, 0))})"
        for why, count in sorted(done["kept"].items())
    )


def age_of(text: str | None) -> float | None:
    """Return the seconds of an age such as ``7d``. Raises UsageError."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    if match is None:
        raise UsageError(
            f"--older-than: {text!r} is not an age; write a number and s, m, h, d or w"
        )
    return float(match[1]) * _SECONDS[match[2]]


def _follow(where: OnMount, order: dict[str, Any], *, quiet: bool) -> dict[str, Any]:
    """Start the job, wait for it and return its result; Ctrl-C cancels it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    job = ask(where.socket, "evict", {"paths": list(where.paths), **order})["job"]
    try:
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=quiet or not sys.stderr.isatty(),
        ) as bar:
            task = bar.add_task("checking", total=None)
            while not (state := ask(where.socket, "job", {"job": job}))["done"]:
                goal = min(order["bytes"] or state["found_bytes"], state["found_bytes"])
                bar.update(
                    task,
                    description=f"checked {state['looked_at']}, evicted {state['blocks']}",
                    completed=state["bytes"],
                    total=goal if state["blocks"] else None,
                )
                time.sleep(_ASK_S)
    except KeyboardInterrupt:
        ask(where.socket, "cancel", {"job": job})
        raise
    return state
