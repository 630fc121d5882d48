"""Is a full pool as fast as an empty one? The same stores on both, and on XFS beside a cleaner.

Run as root: ``python -m tests.bench.measure_full [--size 4M] [--rounds 7]``: JSON, and a table on
stderr.

Three equal loop devices. A round stores half a device's bytes as connectors do (temporary name, one
write, close, rename): on a pool that was full before and evicts all along, on one that was emptied
before, and on an XFS that is kept from filling up by a script that deletes the oldest files.
"""

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

import kvfs
from kvfs.bench.crew import Crew, WorkOrder, wall_s
from kvfs.bench.daemon import KVFS, Daemon, mount_status
from kvfs.bench.self_made import (
    check_room,
    fill_holes,
    folders,
    kvfs_mount,
    loop_device,
    run_tool,
    torn_down,
    unmount,
)
from kvfs.client.subprocesses import program_again
from kvfs.core.errors import BenchFailed
from kvfs.core.sizes import parse_size

FULL: Final = "kvfs, full"
EMPTY: Final = "kvfs, emptied"
XFS: Final = "XFS, with a cleaner"
#: The cleaner starts above this much and stops at that much, and looks so often: in a tenth of what
#: a drive fills at the lowest headroom that is of use.
_CLEANER_SHARES: Final = ("0.90", "0.80")
_CLEANER_LOOKS_S: Final = "0.02"
_P99: Final = 0.99


class Load(NamedTuple):
    """What is stored in a round, and how often."""

    device_bytes: int
    size_bytes: int
    threads: int
    direct: bool
    rounds: int
    data_path: str
    backing: str

    @property
    def blocks(self) -> int:
        """Blocks of a round: half a device, in equal shares."""
        return self.device_bytes // 2 // self.size_bytes // self.threads * self.threads


class Round(NamedTuple):
    """What one round took."""

    rate_bytes_s: float
    p50_us: float
    p99_us: float
    refused: int


class Side:
    """One of the three places."""

    def __init__(self, name: str, directory: str, daemon: Daemon | None) -> None:
        self.name = name
        self.directory = directory
        self.daemon = daemon
        self.rounds: list[Round] = []
        self._stored = 0

    def order(self, load: Load) -> WorkOrder:
        """Return the stores of the next round, under names never used before."""
        self._stored += 1
        return WorkOrder(
            do="store_full",
            directory=self.directory,
            salt=f"{self.name}-{self._stored}",
            blocks=load.blocks,
            size_bytes=load.size_bytes,
            threads=load.threads,
            direct=load.direct,
        )

    def settle(self) -> None:
        """Wait until nothing of before is still being written or freed."""
        os.sync()
        if self.daemon is not None:
            self.daemon.settle()


def run(load: Load, say: Callable[[str], None]) -> dict[str, Any]:
    """Make everything, run all rounds, and return the report. Raises what ``self_made`` raises."""
    check_room(3 * load.device_bytes, load.backing)
    with torn_down() as stack:
        sides = _make(stack, load, say)
        crew = stack.enter_context(Crew(load.threads, load.size_bytes, "tests.bench.full_worker"))
        say("filling the pool and the XFS")
        for side in (sides[0], sides[2]):
            for _ in range(4):
                crew.replies(side.order(load))
        for number in range(load.rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                _round(crew, side, load)
        return report(load, sides, mount_status(os.path.dirname(sides[0].directory)))


def _round(crew: Crew, side: Side, load: Load) -> None:
    if side.name == FULL:
        _require_full(side)
    side.settle()
    order = side.order(load)
    replies = crew.replies(order)
    each_us = sorted(ns / 1e3 for reply in replies for ns in reply["each_ns"])
    side.rounds.append(
        Round(
            rate_bytes_s=load.blocks * load.size_bytes / wall_s(replies),
            p50_us=statistics.median(each_us),
            p99_us=each_us[int(len(each_us) * _P99)],
            refused=sum(reply["refused"] for reply in replies),
        )
    )
    if side.name == EMPTY:
        crew.run(order._replace(do="delete"))


def _require_full(side: Side) -> None:
    status = mount_status(os.path.dirname(side.directory))
    if not status["eviction"]["blocks"]:
        raise BenchFailed("the pool that should be full has evicted nothing")


def _make(stack: ExitStack, load: Load, say: Callable[[str], None]) -> list[Side]:
    images, points = folders(stack, load.backing)
    names = ("full", "empty", "xfs")
    devices = [stack.enter_context(loop_device(images / n, load.device_bytes)) for n in names]
    for name in names:
        os.mkdir(points / name)
    say("making two pools and an XFS, and writing their backing files full")
    for device in devices[:2]:
        run_tool(*KVFS, "mkfs", device)
    run_tool("mkfs.xfs", "-q", devices[2])
    fill_holes(*(images / name for name in names))
    sides = []
    for name, title, device in zip(names, (FULL, EMPTY, XFS), devices, strict=True):
        point = str(points / name)
        daemon = None
        if title == XFS:
            stack.callback(unmount, point)
            run_tool("mount", "-t", "xfs", device, point)
        else:
            stack.enter_context(kvfs_mount(device, point, load.data_path, say))
            daemon = Daemon(int(mount_status(point)["server_pid"]))
        directory = os.path.join(point, "blocks")
        os.mkdir(directory)
        sides.append(Side(title, directory, daemon))
    _start_cleaner(stack, sides[2].directory)
    return sides


def _start_cleaner(stack: ExitStack, directory: str) -> None:
    program, environment = program_again("kvfs.bench.replay.cleaner")
    totals = os.statvfs(directory)
    room_bytes = totals.f_blocks * totals.f_frsize
    cleaner = subprocess.Popen(
        [*program, directory, str(room_bytes), *_CLEANER_SHARES, "mtime", _CLEANER_LOOKS_S],
        env=environment,
        start_new_session=True,
    )
    stack.callback(cleaner.wait)
    stack.callback(cleaner.kill)


def report(load: Load, sides: list[Side], status: dict[str, Any]) -> dict[str, Any]:
    """Return everything measured, with the ratios round by round. Pure but for its arguments."""
    full, empty, xfs = (side.rounds for side in sides)

    def ratio(of: Callable[[Round], float], one: list[Round], other: list[Round]) -> float:
        return statistics.median(of(a) / of(b) for a, b in zip(one, other, strict=True))

    return {
        "format": 1,
        "kvfs": kvfs.__version__,
        "load": load._asdict() | {"blocks_a_round": load.blocks},
        "data_path": status["data_path"],
        "sides": {side.name: [each._asdict() for each in side.rounds] for side in sides},
        "full_to_empty_rate": ratio(lambda r: r.rate_bytes_s, full, empty),
        "full_to_empty_p99": ratio(lambda r: r.p99_us, full, empty),
        "full_to_xfs_rate": ratio(lambda r: r.rate_bytes_s, full, xfs),
        "full_to_xfs_p99": ratio(lambda r: r.p99_us, full, xfs),
        "refused": {side.name: sum(each.refused for each in side.rounds) for side in sides},
        "eviction": status["eviction"],
    }


#: What issue and product promise: a full pool's rate and p99 over an emptied one's.
RATE_AT_LEAST: Final = 0.9
P99_AT_MOST: Final = 1.5


def sides_table(report: dict[str, Any]) -> Table:
    """Return one line a side: medians over the rounds."""
    table = Table(title="Stores; medians over the rounds", box=box.SIMPLE_HEAD)
    table.add_column("where", no_wrap=True)
    for heading in ("GB/s", "p50 us", "p99 us", "refused"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, rounds in report["sides"].items():
        middle = {
            key: statistics.median(each[key] for each in rounds)
            for key in ("rate_bytes_s", "p50_us", "p99_us")
        }
        table.add_row(
            name,
            f"{middle['rate_bytes_s'] / 1e9:.2f}",
            f"{middle['p50_us']:.0f}",
            f"{middle['p99_us']:.0f}",
            str(report["refused"][name]),
        )
    return table


def ratios_table(report: dict[str, Any]) -> Table:
    """Return the ratios with their bounds."""
    table = Table(title="Ratios, round by round", box=box.SIMPLE_HEAD)
    table.add_column("ratio", no_wrap=True)
    for heading in ("measured", "bound"):
        table.add_column(heading, justify="right", no_wrap=True)
    rate, p99 = report["full_to_empty_rate"], report["full_to_empty_p99"]
    table.add_row("rate, full over emptied", f"{rate:.2f}", f"at least {RATE_AT_LEAST}")
    table.add_row("p99, full over emptied", f"{p99:.2f}", f"at most {P99_AT_MOST}")
    table.add_row("rate, full over XFS with a cleaner", f"{report['full_to_xfs_rate']:.2f}", "")
    table.add_row("p99, full over XFS with a cleaner", f"{report['full_to_xfs_p99']:.2f}", "")
    return table


def main() -> None:
    """Run the rounds; print the report and its tables."""
    parser = argparse.ArgumentParser(prog="measure_full", allow_abbrev=False)
    add = parser.add_argument
    add("--device-size", type=parse_size, default="2G", help="of each device (default 2G)")
    add("--backing", default="/dev/shm", help="where they lie (default /dev/shm)")
    add("--data-path", choices=("auto", "passthrough", "daemon"), default="auto")
    add("--size", type=parse_size, default="4M", help="of a block (default 4M)")
    add("--threads", type=int, default=2, help="writers (default 2)")
    add("--direct", action="store_true", help="write with O_DIRECT")
    add("--rounds", type=int, default=7, help="rounds on each (default 7)")
    args = parser.parse_args()
    load = Load(
        device_bytes=args.device_size,
        size_bytes=args.size,
        threads=args.threads,
        direct=args.direct,
        rounds=args.rounds,
        data_path=args.data_path,
        backing=args.backing,
    )
    notes = Console(stderr=True, highlight=False, width=104)
    measured = run(load, notes.print)
    notes.print(sides_table(measured), ratios_table(measured))
    print(json.dumps(measured, indent=1))


if __name__ == "__main__":
    main()
