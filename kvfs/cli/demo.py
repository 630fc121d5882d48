"""``kvfs demo``: mount a small pool, run a KV-shaped load on it, check every byte, clean up."""

import argparse
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvfs.cli.arguments import size_of
from kvfs.cli.failures import need_root
from kvfs.cli.follow import progress_bar
from kvfs.cli.parser import add_verb
from kvfs.cli.tables import console_for_tables
from kvfs.client.subprocesses import held_back
from kvfs.core.errors import UsageError
from kvfs.core.sizes import format_size

if TYPE_CHECKING:
    from rich.table import Table

    from kvfs.bench.kv_load import KvLoad, Moved, ShapeCounts
    from kvfs.cli.parser import Subparsers

#: Every shape is stored several times, and it takes less than a minute on any machine.
DEFAULT_SIZE: Final = "1G"
#: All files of the demo in a directory of the user lie below this name.
FOLDER: Final = "kvfs-demo"
#: With fewer columns the digits of the table would be cut off.
_TABLE_COLUMNS: Final = 80


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "demo",
        run,
        summary="run a KV-shaped load on a small pool and check every byte",
        description="Make a pool in a temporary directory, mount it, store and load KV blocks as "
        "connectors do, check every\nbyte, show how fast it was, unmount and remove the pool. "
        "One wrong byte ends it with exit code 16.",
        example="kvfs demo --bytes 4G\n  kvfs demo --on /kv",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--source", help="make the pool on this blank drive, image or directory")
    where.add_argument(
        "--on", metavar="DIR", help=f"use a new DIR/{FOLDER}; format and mount nothing"
    )
    parser.add_argument(
        "--bytes",
        metavar="SIZE",
        default=DEFAULT_SIZE,
        help=f"data to store ({DEFAULT_SIZE})",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of names and bytes (%(default)s)")
    parser.add_argument(
        "--stored", action="store_true", help="with --on: load what an earlier --keep left there"
    )
    parser.add_argument("--keep", action="store_true", help="leave everything as it is afterwards")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the load where the flags say, and print what it did."""
    total_bytes = size_of(args.bytes, "--bytes")
    assert total_bytes is not None, "--bytes has a default"
    if args.seed < 0:
        raise UsageError("--seed must not be negative")
    if args.stored and not args.on:
        raise UsageError("--stored needs --on, the directory where an earlier --keep left blocks")
    from kvfs.cli.demo_pool import demo_pool

    place: AbstractContextManager[Path]
    if args.on:
        place = _existing(args.on)
    else:
        need_root("kvfs demo")
        place = demo_pool(args.source, total_bytes, keep=args.keep, quiet=args.json)
    # An open file would keep the mount busy, so a signal ends us between two blocks.
    with (
        place as directory,
        _folder(directory, args) as folder,
        held_back() as end_if_told,
    ):
        load = _run_load(folder, args, total_bytes, end_if_told)
    _print_report(load, args)
    return 0


def _existing(directory: str) -> AbstractContextManager[Path]:
    if not os.path.isdir(directory):  # Path.is_dir() would raise for a name that is too long
        raise UsageError(f"--on {directory}: not a directory")
    return nullcontext(Path(directory))


@contextmanager
def _folder(directory: Path, args: argparse.Namespace) -> Iterator[Path]:
    folder = directory / FOLDER
    if args.stored and not os.path.isdir(folder):
        raise UsageError(f"--stored: {folder} does not exist")
    if not args.stored:
        _make_folder(folder)
    try:
        yield folder
    finally:
        if not args.keep and not args.stored:
            with held_back():
                shutil.rmtree(folder)


def _make_folder(folder: Path) -> None:
    # At the end the demo must remove only its own files.
    try:
        folder.mkdir()
    except FileExistsError:
        raise UsageError(f"{folder} exists; load it with --stored, or remove it") from None
    except OSError as error:
        raise UsageError(f"{folder} cannot be created: {error.strerror}") from None


def _run_load(
    folder: Path, args: argparse.Namespace, total_bytes: int, end_if_told: Callable[[], None]
) -> "KvLoad":
    from kvfs.bench.kv_load import KvLoad

    if not args.json:
        print(f"Blocks go to {folder}", flush=True)
    with progress_bar("preparing", quiet=args.json) as show:
        show(0, None)
        moved_bytes = to_move_bytes = 0
        doing = "storing"

        def progress(more_bytes: int) -> None:
            nonlocal moved_bytes
            end_if_told()
            moved_bytes += more_bytes
            text = f"{doing}, {format_size(moved_bytes)} of {format_size(to_move_bytes)}"
            show(moved_bytes, to_move_bytes, text)

        load = KvLoad(folder, total_bytes=total_bytes, seed=args.seed, progress=progress)
        to_move_bytes = load.bytes
        if not args.stored:
            load.store()
        moved_bytes, doing = 0, "loading and checking"
        to_move_bytes *= 2 if load.direct else 1
        load.load()
    return load


def _print_report(load: "KvLoad", args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps(as_json(load), indent=2))
    else:
        console = console_for_tables(_TABLE_COLUMNS, _TABLE_COLUMNS)
        console.print(as_table(load))
        total = load.report.total()
        console.print(
            f"{format_size(total.verified_bytes)} were read back, and every byte is as stored."
        )


def as_table(load: "KvLoad") -> "Table":
    """Return a row for each shape and the sum; rates are of all threads, without the checks."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

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


def as_json(load: "KvLoad") -> dict[str, Any]:
    """Return the same as numbers; rates are in GB/s, 0 if nothing was moved."""
    return {
        "threads": load.report.threads,
        "total": _numbers(load.report.total()),
        "shapes": [
            {"shape": shape.title, "block_bytes": shape.size_bytes, **_numbers(tally)}
            for shape, tally in load.report.tallies.items()
        ],
    }


def _numbers(tally: "ShapeCounts") -> dict[str, Any]:
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


def _rate(moved: "Moved") -> str:
    return f"{moved.rate():.2f}" if moved.bytes else "-"
