"""``kvfs top``, ``kvfs events``: what happens now.

The first shows hit rate and throughput of the caches, with a line for each directory; the second
prints a line of JSON for each event of a block.
"""

import argparse
import json
import math
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from kvfs.cli.failures import one_line
from kvfs.cli.parser import add_verb
from kvfs.cli.quota import tenant_lines
from kvfs.cli.tables import (
    LEAST_COLUMNS,
    Column,
    columns_for_tables,
    console_for_tables,
    headed,
    shown_time,
    table_lines,
)
from kvfs.client.servers import answers_and_dead, complaint, status_of
from kvfs.core.errors import NotMounted, NotRoot, UsageError
from kvfs.core.mount_name import events_path, name_of
from kvfs.core.shown_names import printable
from kvfs.core.sizes import format_size, short_count, short_size, shown_rate
from kvfs.machine.mount_table import resolve_mountpoint

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers

_INTERVAL_S: Final = 2.0
_INTERVAL_LEAST_S: Final = 0.1
#: Lines of a mount besides those of its directories: title, head, sum, and what is left out.
_FRAME_LINES: Final = 5

#: The counters of `kvfs status` whose rates are reported.
_COUNTERS: Final = ("hits", "misses", "loaded_bytes", "stored_bytes", "evicted_bytes")
#: Each counter's rate per second, and ``hit_rate``: hits / (hits + misses), None if both are 0.
Rates = dict[str, float | None]
#: One mount: its status, and what happened since the previous look (``rates``).
Seen = tuple[dict[str, Any], dict[str, Any]]
_COLUMNS: Final = ("hit rate", "hits/s", "misses/s", "loaded/s", "stored/s", "so far", "evicted/s")
#: ``1023.99 MiB`` and a space.
_COLUMN_WIDTH: Final = 12
_NAME_COLUMNS: Final = 14
#: Of tenants those that store most.
_TENANTS_SHOWN: Final = 8
#: From here on all figures fit, in few characters.
_SHORT_COLUMNS: Final = 80
#: Lines about the stream itself, not about a block (docs/events.md).
_OF_THE_STREAM = frozenset({"hello", "quiet"})


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "top",
        run,
        description="Show what the mount at MOUNT (or all mounts) does now: hit rate, hits, "
        "misses, bytes loaded, stored and evicted a second,\nfor the whole and for each "
        "first-level directory, and what several tenants store. Ends with Ctrl-C.\n"
        "Without a terminal it prints a table each time.",
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
        print(_drawn(seen, sys.maxsize, columns_for_tables(LEAST_COLUMNS)))
        return
    for status, found in seen:
        line = {"mountpoint": status["mountpoint"], "interval_s": interval_s, **found}
        line["tenants"] = _sharing(status)
        print(json.dumps(line), flush=True)


def _show(looks: Iterator[list[Seen]]) -> None:
    """Draw every look over the previous one, on the whole terminal."""
    from rich.live import Live
    from rich.text import Text

    console = console_for_tables()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        live.update("kvfs top: one moment", refresh=True)
        for seen in looks:
            lines_max = console.height // max(1, len(seen)) - _FRAME_LINES
            drawn = _drawn(seen, max(1, lines_max), console.width)
            live.update(Text.from_ansi(drawn), refresh=True)


def _drawn(seen: list[Seen], lines_max: int, width: int) -> str:
    return "\n".join(line for one in seen for line in _lines(*one, lines_max, width))


def _lines(
    status: Mapping[str, Any], found: Mapping[str, Any], lines_max: int, width: int
) -> Iterator[str]:
    """Yield the table of one mount: its *status*, and the rates *found* since the last look.

    At most *lines_max* directories, the busiest first; and several tenants with what they store.
    Below _SHORT_COLUMNS it leaves out what
    *width* has no room for, because a figure over two lines cannot be read.
    """
    shorts = width < _NAME_COLUMNS + _COLUMN_WIDTH * len(_COLUMNS)
    fitting = max(1, (width - _NAME_COLUMNS) // _COLUMN_WIDTH)
    figures = _COLUMNS if width >= _SHORT_COLUMNS else _COLUMNS[:fitting]
    cache = status["cache"]
    tenants = _sharing(status)
    lines_max = max(1, lines_max - len(tenants) - bool(tenants))
    rows = [("(all)", *_cells(found["total"], cache["hit_rate"], shorts=shorts))]
    for name, each in busiest(found["directories"], lines_max):
        so_far = cache["directories"].get(name, {}).get("hit_rate")
        rows.append((printable(name), *_cells(each, so_far, shorts=shorts)))
    columns = (
        Column("directory", folds=True, least=_NAME_COLUMNS),
        *(Column(name, right=True) for name in figures),
    )
    heads, total, *lines = table_lines(columns, [row[: len(columns)] for row in rows], width)
    title = table_lines([Column(folds=True)], [[_heading(status)]], width)
    yield from map(headed, (*title, heads, total))
    yield from lines
    if (hidden := len(found["directories"]) - lines_max) > 0:
        yield f"({hidden} more)"
    if tenants:
        heads, *lines = tenant_lines(tenants, width)
        yield from (headed(heads), *lines)


def _sharing(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the accounts of the tenants that store most, none if only one stores anything."""
    tenants = status.get("tenants", {})  # the running server may be an older one
    storing = {who: row for who, row in tenants.items() if row["stored_bytes"]}
    return dict(islice(storing.items(), _TENANTS_SHOWN)) if len(storing) > 1 else {}


def _heading(status: Mapping[str, Any]) -> str:
    used, capacity = format_size(status["used_bytes"]), format_size(status["capacity_bytes"])
    device = status["cache"].get("device", {})  # the running server may be an older one
    parts = [f"{used} of {capacity}", f"{status['blocks']:,} blocks"]
    if device.get("write_rate") is not None:
        parts.append(f"{format_size(int(device['write_rate']))}/s written to the device")
    if device.get("endurance_left") is not None:
        parts.append(f"{shown_rate(device['endurance_left'])} of its endurance left")
    parts.append(f"up {shown_time(status['cache']['uptime_s'])}")
    return f"{printable(str(status['mountpoint']))}   {', '.join(parts)}"


def _cells(found: Rates, so_far: float | None, *, shorts: bool) -> list[str]:
    size = short_size if shorts else format_size
    loaded, stored, evicted = (
        size(int(found[f"{kind}_bytes"] or 0)) for kind in ("loaded", "stored", "evicted")
    )
    counts = [found[kind] or 0 for kind in ("hits", "misses")]
    shown = [short_count(each) if shorts else f"{each:,.0f}" for each in counts]
    return [shown_rate(found["hit_rate"]), *shown, loaded, stored, shown_rate(so_far), evicted]


def configure_events(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "events",
        run_events,
        description="Print what happens to the blocks of MOUNT from now on, a line of JSON for "
        "each: stored, missing, evicted, removed.\nEnds with the mount, or at Ctrl-C. A program "
        "reads the same lines from /run/kvfs/NAME.events itself.",
        example="kvfs events /kv\n  kvfs events /kv --count 100",
    )
    parser.add_argument("mountpoint", metavar="MOUNT")
    parser.add_argument("--count", metavar="N", type=int, help="end after N events")
    parser.add_argument(
        "--format",
        choices=("json", "vllm"),
        default="json",
        help="vllm: messages in msgpack as vLLM sends them, of blocks that its tier fs stored",
    )
    parser.add_argument(
        "--publish",
        metavar="ENDPOINT",
        help="with --format vllm: by ZeroMQ, as in tcp://*:5557, in place of standard output",
    )
    parser.add_argument("--topic", default="", help="of what is published: kv@POD@MODEL for llm-d")


def run_events(args: argparse.Namespace) -> int:
    """Print lines until the stream ends."""
    if args.count is not None and args.count < 1:
        raise UsageError("--count must be greater than 0")
    if args.publish and args.format != "vllm":
        raise UsageError("--publish needs --format vllm")
    said = _as_vllm if args.format == "vllm" else _as_line
    path, left = _events_path(args.mountpoint), args.count
    with _sending(args.publish, args.topic) as send:
        try:
            for line in _event_lines(path):
                if (message := said(line)) is None:
                    continue
                send(message)
                if left is not None and (left := left - 1) == 0:
                    break
        except KeyboardInterrupt:
            sys.stderr.write("\n")
    return 0


@contextmanager
def _sending(endpoint: str | None, topic: str) -> Iterator[Callable[[bytes], None]]:
    """Yield what prints a message, or publishes it at *endpoint*. Raises UsageError."""
    if endpoint is None:
        yield _printed
        return
    from kvfs.bridges.vllm_events import EventPublisher

    with closing(EventPublisher(endpoint, topic)) as publisher:
        yield publisher.send


def _printed(message: bytes) -> None:
    sys.stdout.buffer.write(message)
    sys.stdout.buffer.flush()


def _as_line(line: str) -> bytes | None:
    return None if json.loads(line)["event"] in _OF_THE_STREAM else line.encode() + b"\n"


def _as_vllm(line: str) -> bytes | None:
    from kvfs.bridges.vllm_events import batch_of_event

    return batch_of_event(json.loads(line))


def _events_path(mountpoint: str) -> str:
    try:
        return events_path(str(status_of(mountpoint)["name"]))
    except NotRoot:  # the events may be for others, too (events_socket_mode)
        return events_path(name_of(resolve_mountpoint(mountpoint)))


def _event_lines(path: str) -> Iterator[str]:
    """Yield the lines of the stream at *path*. Raises NotMounted, NotRoot."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        try:
            connection.connect(path)
        except PermissionError:
            raise NotRoot(f"{path} is for root; see the setting events_socket_mode") from None
        except OSError as error:
            raise NotMounted(f"no events at {path}: {error.strerror}") from None
        with connection.makefile("r", encoding="utf-8", newline="\n") as stream:
            for line in stream:
                yield line.rstrip("\n")


# ---- what a cache did between two looks at its counters: rates, in all and by directory ----


def rates(before: Mapping[str, Any], after: Mapping[str, Any], passed_s: float) -> dict[str, Any]:
    """Return the rates between *before* and *after*, two ``cache`` objects of one mount's status.

    The keys are ``total`` and ``directories``. A server that restarted meanwhile counts from 0.
    """
    if after["uptime_s"] < before["uptime_s"]:
        before = {"directories": {}}
    directories = {
        name: _rates(before["directories"].get(name, {}), each, passed_s)
        for name, each in after["directories"].items()
    }
    return {"total": _rates(_whole(before), _whole(after), passed_s), "directories": directories}


def busiest(directories: Mapping[str, Rates], most: int) -> list[tuple[str, Rates]]:
    """Return *most* of the directories, those with most hits and misses first."""

    def asked(row: tuple[str, Rates]) -> tuple[float, str]:
        return -((row[1]["hits"] or 0) + (row[1]["misses"] or 0)), row[0]

    return sorted(directories.items(), key=asked)[:most]


def _whole(cache: Mapping[str, Any]) -> dict[str, int]:
    """Return the counters of the whole cache: the sums of its directories."""
    tallies = cache["directories"].values()
    return {name: sum(each[name] for each in tallies) for name in _COUNTERS}


def _rates(before: Mapping[str, int], after: Mapping[str, int], passed_s: float) -> Rates:
    # A count can shrink: once a directory is removed, its counts belong to the rest.
    grown = {name: max(0, after[name] - before.get(name, 0)) for name in _COUNTERS}
    asked = grown["hits"] + grown["misses"]
    found: Rates = {name: round(count / passed_s, 3) for name, count in grown.items()}
    return {"hit_rate": grown["hits"] / asked if asked else None, **found}
