"""``kvfs demo``: mount a small pool, run a KV-shaped load on it, check every byte, clean up.

Beside the pool the same load runs in a plain directory. Then the pool is filled five times over,
and an XFS of its size as well (demo_overfill.py).
"""

import argparse
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvfs.cli.arguments import size_of
from kvfs.cli.failures import need_root
from kvfs.cli.follow import progress_bar
from kvfs.cli.parser import add_verb
from kvfs.cli.tables import console_for_tables
from kvfs.client.servers import status_of
from kvfs.client.subprocesses import held_back
from kvfs.core.errors import BenchFailed, UsageError
from kvfs.core.sizes import format_size

if TYPE_CHECKING:
    from kvfs.bench.kv_load import KvLoad
    from kvfs.cli.parser import Subparsers

#: Every shape is stored several times, and with all that follows it takes less than two minutes on
#: a disk that writes 150 MB/s.
DEFAULT_SIZE: Final = "256M"
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
        "connectors do, check every byte,\nand show how fast it was beside a plain directory. "
        "Then fill the pool five times over, kill and upgrade its\nserver meanwhile, and do the "
        "same to an XFS of that size. Unmount and remove everything. One wrong byte ends it\nwith "
        "exit code 16. With --on, --keep or --load-only it only stores and loads; with --source "
        "nothing runs beside it.",
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
    parser.add_argument(
        "--load-only", action="store_true", help="no plain directory, no filling over, no kill"
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
    if args.on:
        with _existing(args.on) as directory, held_back() as end_if_told:
            load, _ = _loads(directory, None, args, total_bytes, end_if_told)
        _print_load(load, None, args)
        return 0
    need_root("kvfs demo")
    from kvfs.cli.demo_pool import demo_pool

    fills_over = not (args.keep or args.load_only)
    # A directory beside a drive or an image of the user's would be on another device.
    is_beside = args.source is None and fills_over
    with (
        demo_pool(
            args.source, total_bytes, beside=is_beside, keep=args.keep, quiet=args.json
        ) as mountpoint,
        # An open file would keep the mount busy, so a signal ends us between two blocks.
        held_back() as end_if_told,
    ):
        plain = mountpoint.parent / "plain" if is_beside else None
        if plain is not None:
            plain.mkdir()
        load, beside = _loads(mountpoint, plain, args, total_bytes, end_if_told)
        if not args.json:
            _print_load(load, beside, args)
        overfilled = _overfill(mountpoint, is_beside, args, end_if_told) if fills_over else None
    if args.json:
        _print_load(load, beside, args, overfilled)
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


def _loads(
    directory: Path,
    plain: Path | None,
    args: argparse.Namespace,
    total_bytes: int,
    end_if_told: Callable[[], None],
) -> "tuple[KvLoad, KvLoad | None]":
    """Run the load in *directory* and, in turns with it, in *plain*."""
    with ExitStack() as stack:
        folder = stack.enter_context(_folder(directory, args))
        folders = [folder]
        if not args.json:
            print(f"Blocks go to {folder}", flush=True)
        if plain is not None:
            folders.append(stack.enter_context(_folder(plain, args)))
            if not args.json:
                print(f"  and, beside it, to the plain directory {folders[1]}", flush=True)
        load, *others = _run_loads(folders, args, total_bytes, end_if_told)
    return load, others[0] if others else None


def _run_loads(
    folders: list[Path],
    args: argparse.Namespace,
    total_bytes: int,
    end_if_told: Callable[[], None],
) -> "list[KvLoad]":
    from kvfs.bench.kv_load import KvLoad

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

        loads = [
            KvLoad(folder, total_bytes=total_bytes, seed=args.seed, progress=progress)
            for folder in folders
        ]
        to_move_bytes = sum(load.bytes for load in loads)
        for load in [] if args.stored else loads:
            _settle(folders)
            load.store()
        moved_bytes, doing = 0, "loading and checking"
        to_move_bytes = sum(load.bytes * (2 if load.direct else 1) for load in loads)
        for load in loads:
            _settle(folders)
            load.load()
    return loads


def _settle(folders: list[Path]) -> None:
    """Wait until one side has written back its data, so that the other side is not slowed by it."""
    from kvfs.bench.daemon import Daemon

    if len(folders) > 1:
        os.sync()
        Daemon(int(status_of(str(folders[0].parent))["server_pid"])).settle()


def _overfill(
    mountpoint: Path, is_beside: bool, args: argparse.Namespace, end_if_told: Callable[[], None]
) -> dict[str, Any]:
    """Fill the pool five times over, and an XFS of its size; print and return what happened."""
    from kvfs.bench.overfill import TIMES
    from kvfs.cli import demo_overfill
    from kvfs.cli.demo_pool import run_kvfs, tell

    def say(line: str) -> None:
        if not args.json:
            tell(line)

    def upgrade() -> None:
        said = run_kvfs("upgrade", str(mountpoint), quiet=args.json)
        say(f"  {said.strip()}")

    say(f"\nNow {TIMES} times what the pool has room for, with a kill and an upgrade on the way:")
    with progress_bar("filling", quiet=args.json) as show:
        bar = demo_overfill.Bar(show, end_if_told)
        side, story = demo_overfill.on_kvfs(mountpoint, args.seed, bar, say, upgrade)
        sides = [side]
        if is_beside:
            say("The same requests on an XFS of that size, alone and beside a script that deletes")
            say("the oldest blocks:")
            room_bytes = int(status_of(str(mountpoint))["usable_bytes"])
            try:
                sides += demo_overfill.on_plain(mountpoint.parent, room_bytes, args.seed, bar)
            except BenchFailed as error:
                say(f"  not shown, this machine cannot make one: {error}")
    if not args.json:
        console = console_for_tables(_TABLE_COLUMNS, _TABLE_COLUMNS)
        console.print(demo_overfill.as_table(sides))
        for sentence in demo_overfill.in_words(sides, story):
            console.print(f"- {sentence}")
    return demo_overfill.as_json(sides, story)


def _print_load(
    load: "KvLoad",
    plain: "KvLoad | None",
    args: argparse.Namespace,
    overfilled: dict[str, Any] | None = None,
) -> None:
    from kvfs.cli.demo_report import as_json, as_table, in_words

    if args.json:
        told = as_json(load, plain)
        print(json.dumps(told | ({"overfilled": overfilled} if overfilled else {}), indent=2))
    else:
        console = console_for_tables(_TABLE_COLUMNS, _TABLE_COLUMNS)
        console.print(as_table(load, plain))
        console.print(in_words(load))
