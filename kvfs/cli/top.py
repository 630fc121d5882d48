"""``kvfs top``: hit rate and throughput of the caches, live, with a line per directory."""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from kvfs.cli.failures import one_line
from kvfs.cli.parser import add_verb
from kvfs.cli.tables import console_for_tables
from kvfs.client.servers import answers_and_dead, complaint, status_of
from kvfs.core.cache_rates import rates
from kvfs.core.errors import NotMounted, UsageError

if TYPE_CHECKING:
    from rich.console import Group

    from kvfs.cli.parser import Subparsers

_INTERVAL_S: Final = 2.0
_INTERVAL_LEAST_S: Final = 0.1
#: Lines of a mount besides those of its directories: title, head, sum, and what is left out.
_FRAME_LINES: Final = 5

#: One mount: its status, and what happened since the previous look (cache_rates.py).
Seen = tuple[dict[str, Any], dict[str, Any]]


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "top",
        run,
        description="Show what the mount at MOUNT (or all mounts) does now: hit rate, hits, "
        "misses, bytes loaded, stored and evicted a second,\nfor the whole and for each "
        "first-level directory. Ends with Ctrl-C. Without a terminal it prints a table each time.",
        example="kvfs top /kv\n  kvfs top /kv --once --json --interval 10",
    )
    parser.add_argument("mountpoint", metavar="MOUNT", nargs="?")
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=float,
        default=_INTERVAL_S,
        help="time between two looks (default 2)",
    )
    parser.add_argument("--once", action="store_true", help="wait once, print, and end")
    parser.add_argument("--json", action="store_true", help="print a JSON object a line")


def run(args: argparse.Namespace) -> int:
    """Look at intervals, and show what happened between two looks."""
    if not math.isfinite(args.interval) or args.interval < _INTERVAL_LEAST_S:
        raise UsageError(f"--interval {args.interval:g}: give at least {_INTERVAL_LEAST_S:g} s")
    looks = _looks(args.mountpoint, args.interval)
    try:
        if args.json or args.once or not sys.stdout.isatty():
            for seen in looks:
                _print(seen, args.interval, as_json=args.json)
                if args.once:
                    break
        else:
            _show(looks)
    except KeyboardInterrupt:  # the usual end
        return 0
    return 0


def _looks(mountpoint: str | None, interval_s: float) -> Iterator[list[Seen]]:
    """Yield the mounts every *interval_s*, each with its rates since the previous look."""
    before = _statuses(mountpoint)
    looked_s = time.monotonic()
    while True:
        time.sleep(interval_s)
        after = _statuses(mountpoint)
        now_s = time.monotonic()
        passed_s, looked_s = now_s - looked_s, now_s
        yield [
            (status, rates(before[where]["cache"], status["cache"], passed_s))
            for where, status in after.items()
            if where in before
        ]
        before = after


def _statuses(mountpoint: str | None) -> dict[str, dict[str, Any]]:
    """Return the status of each mount by its mountpoint. Raises NotMounted, ServeFailed.

    A mount whose device is lost has no cache, and is left out.
    """
    if mountpoint is not None:
        found = [status_of(mountpoint)]
    else:
        answered = answers_and_dead()
        found = [answer.status for answer in answered if answer.error is None]
        for answer in answered:
            if answer.error is not None:
                print(f"kvfs: {one_line(complaint(answer))}", file=sys.stderr)
        if not found:
            raise NotMounted("no kvfs is mounted")
    served = {str(status["mountpoint"]): status for status in found if "cache" in status}
    if not served:
        raise NotMounted("the device is lost; kvfs status says why")
    return served


def _print(seen: list[Seen], interval_s: float, *, as_json: bool) -> None:
    if not as_json:
        console = console_for_tables()
        console.print(_drawn(seen, sys.maxsize, console.width))
        return
    for status, found in seen:
        line = {"mountpoint": status["mountpoint"], "interval_s": interval_s, **found}
        print(json.dumps(line), flush=True)


def _show(looks: Iterator[list[Seen]]) -> None:
    """Draw every look over the previous one, on the whole terminal."""
    from rich.live import Live

    console = console_for_tables()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        live.update("kvfs top: one moment", refresh=True)
        for seen in looks:
            lines_max = console.height // max(1, len(seen)) - _FRAME_LINES
            live.update(_drawn(seen, max(1, lines_max), console.width), refresh=True)


def _drawn(seen: list[Seen], lines_max: int, columns: int) -> "Group":
    from rich.console import Group

    from kvfs.cli.top_screen import screen

    return Group(*(screen(status, found, lines_max, columns) for status, found in seen))
