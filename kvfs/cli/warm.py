"""``kvfs warm``: read blocks into the page cache ahead of their use."""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvfs.cli.arguments import below_mount, locate, size_of
from kvfs.cli.parser import add_verb
from kvfs.client.control_socket import ask
from kvfs.client.warming import Warming, files_of, kvfs_devices, memory_available_bytes
from kvfs.core.errors import PathMissing, UsageError
from kvfs.core.printable import printable
from kvfs.core.sizes import count_of, format_size

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "warm",
        run,
        description="Read the files at PATHs, and below directories, so that the next loads come "
        "from memory. A PATH of - is a list on\nstandard input, one path a line. With --hottest, "
        "PATHs are mounts: their most recently used blocks are read, also\nthose used before the "
        "last stop (needs root). Reading counts as a use, so what is warmed is evicted later.\n"
        "Stops at --bytes, by default half of the memory that is available, and reads no faster "
        "than --rate.\nEnds with exit code 20 if nothing was read.",
        example="kvfs warm /kv/system-prompts\n  kvfs warm --hottest /kv --bytes 20G\n  "
        "kvfs warm - < list",
    )
    parser.add_argument("paths", metavar="PATH", nargs="+")
    parser.add_argument("--hottest", action="store_true", help="what was used last on the mounts")
    parser.add_argument("--bytes", metavar="SIZE", help="most to read, e.g. 20G")
    parser.add_argument("--rate", metavar="SIZE", default="1G", help="a second (default 1G)")
    parser.add_argument("--dry-run", action="store_true", help="print the paths; read nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Read, and print how much."""
    rate_bytes = size_of(args.rate, "--rate") or 0
    limit_bytes = size_of(args.bytes, "--bytes") or memory_available_bytes() // 2
    if not limit_bytes:
        raise UsageError("this machine does not tell how much memory is available: give --bytes")
    paths = _hottest(args.paths, limit_bytes) if args.hottest else _named(args.paths)
    if args.dry_run:
        for path in paths:
            print(printable(path))
        return 0
    warming = Warming(kvfs_devices(), limit_bytes, rate_bytes)
    took_s = _read_all(warming, paths, limit_bytes, quiet=args.json)
    _tell(warming, took_s, limit_bytes, as_json=args.json)
    if not warming.blocks:
        sys.stdout.flush()
        raise PathMissing(f"no block at {', '.join(args.paths)} could be read")
    return 0


def _named(paths: list[str]) -> Iterator[str]:
    """Yield the files at *paths*; those on standard input are looked up as they come."""
    for path in paths:
        if path == "-":
            continue
        below_mount(path)
        if not os.path.lexists(path):
            raise PathMissing(f"there is no {printable(path)} on this mount")
    for path in paths:
        for one in _lines() if path == "-" else [path]:
            yield from files_of(one)


def _lines() -> Iterator[str]:
    for line in sys.stdin.buffer:
        if path := line.rstrip(b"\n"):
            yield os.fsdecode(path)


def _hottest(mountpoints: list[str], limit_bytes: int) -> Iterator[str]:
    """Yield the paths of the blocks used last, for up to *limit_bytes* in all."""
    told_bytes = 0
    for mountpoint in mountpoints:
        where = locate([mountpoint])
        after: int | None = 0
        while after is not None and told_bytes < limit_bytes:
            told = ask(where.socket, "hottest", {"after": after})
            for path, size_bytes in told["blocks"]:
                if told_bytes >= limit_bytes:
                    break
                told_bytes += size_bytes
                yield f"{where.mountpoint}{path}"
            after = told["next"]


def _read_all(warming: Warming, paths: Iterator[str], limit_bytes: int, *, quiet: bool) -> float:
    """Read each of *paths* until the limit; return the seconds that it took."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    began_s = time.monotonic()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=quiet or not sys.stderr.isatty(),
    ) as bar:
        task = bar.add_task("reading", total=limit_bytes)
        for path in paths:
            if warming.is_full:
                break
            warming.read(path)
            text = f"{count_of(warming.blocks, 'block')}, {format_size(warming.bytes)}"
            bar.update(task, description=text, completed=warming.bytes)
    return time.monotonic() - began_s


def _tell(warming: Warming, took_s: float, limit_bytes: int, *, as_json: bool) -> None:
    if as_json:
        told: dict[str, Any] = {
            "blocks": warming.blocks,
            "bytes": warming.bytes,
            "left": dict(warming.left),
            "stopped_at_bytes": limit_bytes if warming.is_full else None,
            "took_s": round(took_s, 3),
        }
        print(json.dumps(told, indent=2))
        return
    blocks = count_of(warming.blocks, "block")
    line = f"{blocks}, {format_size(warming.bytes)} read in {took_s:.1f} s"
    if warming.left:
        why = ", ".join(f"{why} {count:,}" for why, count in sorted(warming.left.items()))
        line += f"; {sum(warming.left.values()):,} not: {why}"
    if warming.is_full:
        line += f"; stopped at --bytes {format_size(limit_bytes)}"
    print(line)
