"""``kvfs demo``: mount a small pool, run a KV-shaped load on it, check every byte, clean up."""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvfs.cli.arguments import size_of
from kvfs.cli.caller import need_root
from kvfs.cli.parser import add_verb
from kvfs.cli.tables import console_for_tables
from kvfs.client.subprocesses import held_back
from kvfs.core.errors import UsageError
from kvfs.core.sizes import format_size

if TYPE_CHECKING:
    from kvfs.bench.kv_load import KvLoad
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
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    from kvfs.bench.kv_load import KvLoad

    if not args.json:
        print(f"Blocks go to {folder}", flush=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=args.json or not sys.stderr.isatty(),
    ) as bar:
        task = bar.add_task("preparing", total=None)

        def progress(moved_bytes: int) -> None:
            end_if_told()
            bar.advance(task, moved_bytes)

        load = KvLoad(
            folder,
            total_bytes=total_bytes,
            seed=args.seed,
            progress=progress,
        )
        if not args.stored:
            bar.reset(task, description="storing", total=load.bytes)
            load.store()
        checks = 2 if load.direct else 1
        bar.reset(task, description="loading and checking", total=checks * load.bytes)
        load.load()
    return load


def _print_report(load: "KvLoad", args: argparse.Namespace) -> None:
    from kvfs.cli.demo_report import as_json, as_table

    if args.json:
        print(json.dumps(as_json(load), indent=2))
    else:
        console = console_for_tables(_TABLE_COLUMNS, _TABLE_COLUMNS)
        console.print(as_table(load))
        total = load.report.total()
        console.print(
            f"{format_size(total.verified_bytes)} were read back, and every byte is as stored."
        )
