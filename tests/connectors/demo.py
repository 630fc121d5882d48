"""``make demo CONNECTOR=lmcache``: LMCache's own L2 path on a kvfs mount and on a plain directory.

LMCache's adapters, unchanged, store, look up and load the same blocks on both; every byte that is
loaded is checked. The sides take turns, so that what else the machine does falls on both.
"""

import argparse
import json
import shutil
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvfs.cli.arguments import size_of
from kvfs.cli.demo_pool import demo_pool
from kvfs.cli.failures import explain
from kvfs.core.errors import CommandError, ToolMissing, UsageError, VerifyFailed
from tests.connectors.connector import Connector, interpreter

MIB: Final = 1 << 20
#: 256 tokens of Llama-3.1-8B, as LMCache stores them by default.
BLOCK_BYTES: Final = 32 * MIB
#: What LMCache hands to an adapter at once; also how many blocks its memory here holds.
BATCH: Final = 4
LOOKUPS: Final = 200
ROUNDS: Final = 3
SIDES: Final = ("plain", "kvfs")
VERBS: Final = ("store", "load", "lookup")

CONFIGURATIONS: Final[dict[str, dict[str, Any]]] = {
    "fs_native, O_DIRECT": {"type": "fs_native", "num_workers": 4, "use_odirect": True},
    "fs_native": {"type": "fs_native", "num_workers": 4},
    "fs": {"type": "fs"},
}


class Figures(NamedTuple):
    """Rates of one side in one configuration, the median of the rounds."""

    store_gb_s: float
    load_gb_s: float
    lookups_per_s: float


def measure(
    lmcache: Connector, directory: Path, spec: dict[str, Any], keys: list[int], version: int
) -> dict[str, float]:
    """Store, look up and load blocks once; return the rate of each verb. Raises VerifyFailed."""
    full = {**spec, "base_path": str(directory)}
    lmcache.call("open", kv_dir=str(directory), size_bytes=BLOCK_BYTES, slots=BATCH, spec=full)
    if not lmcache.call("store", keys=keys, version=version)["ok"]:
        raise VerifyFailed(f"LMCache could not store in {directory}: {lmcache.log_tail()}")
    absent = [key + 1_000_000 for key in keys]
    for _ in range(LOOKUPS):
        if lmcache.call("lookup", keys=keys + absent) != keys:
            raise VerifyFailed(f"a lookup in {directory} found other blocks than were stored")
    done = lmcache.call("load", keys=keys, version=version)
    if done["intact"] != keys:
        raise VerifyFailed(
            f"{directory}: of {len(keys)} blocks {len(done['loaded'])} were loaded and "
            f"{len(done['intact'])} hold what was stored"
        )
    spent_s = {verb: ns / 1e9 for verb, ns in lmcache.call("spent").items()}
    lmcache.call("close")
    moved_gb = len(keys) * BLOCK_BYTES / 1e9
    return {
        "store": moved_gb / spent_s["store"],
        "load": moved_gb / spent_s["load"],
        "lookup": LOOKUPS * 2 * len(keys) / spent_s["lookup"],
    }


@contextmanager
def lmcaches(python: Path) -> Iterator[dict[str, Connector]]:
    """Yield a process with LMCache in it for each side; they are gone afterwards."""
    sides: dict[str, Connector] = {}
    try:
        for side in SIDES:
            sides[side] = Connector(python, "lmcache_l2")
        yield sides
    finally:
        for connector in sides.values():
            connector.kill()


def compare(
    sides: dict[str, Connector], places: dict[str, Path], count: int, *, quiet: bool
) -> dict[str, dict[str, Figures]]:
    """Return the figures by configuration and side."""
    keys = list(range(count))
    found: dict[str, dict[str, Figures]] = {}
    for name, spec in CONFIGURATIONS.items():
        rates: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for turn in range(ROUNDS):
            for side in SIDES if turn % 2 == 0 else reversed(SIDES):
                directory = places[side] / f"{spec['type']}-{turn}"
                directory.mkdir()
                started_s = time.monotonic()
                for verb, rate in measure(sides[side], directory, spec, keys, turn).items():
                    rates[side][verb].append(rate)
                shutil.rmtree(directory)
                if not quiet:
                    spent_s = time.monotonic() - started_s
                    print(f"{name}, round {turn + 1} of {ROUNDS}, {side}: {spent_s:.1f} s")
        found[name] = {
            side: Figures(*(statistics.median(rates[side][verb]) for verb in VERBS))
            for side in SIDES
        }
    return found


def show(found: dict[str, dict[str, Figures]], count: int) -> None:
    """Print the figures side by side."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"LMCache L2, {count} blocks of {BLOCK_BYTES // MIB} MiB, {BATCH} at a time",
        caption=f"median of {ROUNDS} rounds; lookups: half of them hits",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("adapter", no_wrap=True)
    table.add_column("")
    heads = ("store GB/s", "load GB/s", "lookups/s")
    for head in heads:
        table.add_column(head, justify="right")
    for name, sides in found.items():
        for side in SIDES:
            store, load, lookups = sides[side]
            table.add_row(
                name if side == SIDES[0] else "",
                side,
                f"{store:.2f}",
                f"{load:.2f}",
                f"{lookups:,.0f}",
            )
        ratios = [
            f"{kv / plain:.2f}" for kv, plain in zip(sides["kvfs"], sides["plain"], strict=True)
        ]
        table.add_row("", "kvfs / plain", *ratios, end_section=True)
    Console(highlight=False).print(table)
    moved_bytes = count * BLOCK_BYTES * ROUNDS * len(CONFIGURATIONS)
    print(f"{moved_bytes:,} bytes were loaded on each side, and every one is what was stored.")


def run(arguments: argparse.Namespace) -> None:
    """Make the places, compare, print."""
    python = interpreter()
    if python is None:
        raise ToolMissing(
            "LMCache is not installed: sh tests/connectors/install.sh .venv-connectors"
        )
    total_bytes = size_of(arguments.bytes, "--bytes") or 0
    count = total_bytes // BLOCK_BYTES
    if count < 1:
        raise UsageError(f"--bytes: give at least a block of {BLOCK_BYTES // MIB} MiB")
    with ExitStack() as stack:
        # Twice: the plain directory lies beside the pool, on the same file system.
        kv = stack.enter_context(
            demo_pool(
                arguments.source,
                2 * total_bytes,
                beside=False,
                keep=False,
                quiet=arguments.json,
            )
        )
        places = {"kvfs": kv, "plain": kv.parent / "plain"}
        places["plain"].mkdir()
        if not arguments.json:
            print(f"The plain directory is {places['plain']}", flush=True)
        sides = stack.enter_context(lmcaches(python))
        found = compare(sides, places, count, quiet=arguments.json)
    if arguments.json:
        shown = {
            "block_bytes": BLOCK_BYTES,
            "blocks": count,
            "rounds": ROUNDS,
            "adapters": {
                name: {side: figures._asdict() for side, figures in sides.items()}
                for name, sides in found.items()
            },
        }
        print(json.dumps(shown, indent=2))
    else:
        show(found, count)


def main() -> int:
    """Run as kvfs's own commands do: a mistake is one line and an exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("connector", choices=["lmcache"])
    parser.add_argument("--bytes", default="256M", help="to store in each round (%(default)s)")
    parser.add_argument("--source", help="make the pool of this blank drive, image or directory")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    try:
        run(parser.parse_args())
    except (CommandError, KeyboardInterrupt) as error:
        line, exit_code = explain(error)
        print(f"demo: {line}", file=sys.stderr)
        return exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
