"""What durability costs two writers: the pass, checksums and checkpoints together, on against off.

Run as root: ``python -m tests.bench.measure_durability [--backing DIR] [--rounds 7]``: JSON.
``--on durable_within_s=0.2`` measures the pass alone, and ``--on durable_within_s=0`` nothing: how
much two equal pools differ.

Two equal pools, one that does all three and one that does none. A round stores the same blocks on
each, one after the other. A round is many times as long as the window, so that the pass makes most
of the round's blocks durable while the others are stored: what it costs then, it costs for good.
Write amplification is what the device was written, until all was durable, by what was stored.
"""

import argparse
import json
import os
import statistics
from typing import Any, Final, NamedTuple

from kvfs.bench.crew import Crew, Order, wall_s
from kvfs.bench.daemon import KVFS, Daemon, mount_status
from kvfs.bench.replay.device_writes import written_bytes
from kvfs.bench.self_made import (
    fill_holes,
    folders,
    kvfs_mount,
    loop_device,
    run_tool,
    torn_down,
)
from kvfs.core.sizes import parse_size

BLOCK_BYTES: Final = 32 << 20
WRITERS: Final = 2
ON, OFF = "on", "off"
#: Windows far shorter than a round; all else as it is by default.
ON_FLAGS: Final = ("durable_within_s=0.2", "checkpoint_s=2", "checksum_share=0.1")
OFF_FLAGS: Final = ("durable_within_s=0", "checkpoint_s=0", "checksum_share=0")


class Side:
    """One pool, and what its rounds took."""

    def __init__(self, name: str, device: str, point: str) -> None:
        self.name, self.device, self.point = name, device, point
        self.directory = os.path.join(point, "blocks")
        os.mkdir(self.directory)
        self.daemon = Daemon(int(mount_status(point)["server_pid"]))
        self.rates: list[float] = []
        self.amplification: list[float] = []
        self.marked_in_round: list[float] = []


class Load(NamedTuple):
    """What a round stores."""

    blocks: int
    direct: bool


def marked(side: Side) -> int:
    """Return how many blocks the pass has made durable so far."""
    return int(mount_status(side.point)["durability"]["marked"])


def one_round(crew: Crew, side: Side, load: Load, number: int) -> None:
    """Store, note the rate and what was written, and delete."""
    order = Order(
        do="store",
        directory=side.directory,
        salt=f"{side.name}-{load.direct}-{number}",
        blocks=load.blocks,
        size_bytes=BLOCK_BYTES,
        threads=WRITERS,
        direct=load.direct,
    )
    os.sync()
    side.daemon.settle()
    before, marked_before = written_bytes(side.device), marked(side)
    took_s = wall_s(crew.replies(order))
    in_round = marked(side) - marked_before
    run_tool(*KVFS, "sync", side.point)
    after = written_bytes(side.device)
    assert before is not None
    assert after is not None
    stored_bytes = load.blocks * BLOCK_BYTES
    side.rates.append(stored_bytes / took_s)
    side.amplification.append((after - before) / stored_bytes)
    side.marked_in_round.append(in_round / load.blocks)
    crew.run(order._replace(do="delete"))


def summary(sides: list[Side]) -> dict[str, Any]:
    """Return the ratios round by round, and the medians."""
    on, off = sides
    ratios = [one / other for one, other in zip(on.rates, off.rates, strict=True)]
    return {
        "on_over_off": round(statistics.median(ratios), 3),
        "quartiles": [round(at, 3) for at in statistics.quantiles(ratios, n=4)],
        "ratios": [round(ratio, 3) for ratio in ratios],
        "rate_bytes_s": {side.name: int(statistics.median(side.rates)) for side in sides},
        "write_amplification": {
            side.name: round(statistics.median(side.amplification), 4) for side in sides
        },
        "made_durable_within_the_round": round(statistics.median(on.marked_in_round), 2),
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Make both pools, run all rounds, and return the report."""
    size_bytes = parse_size(arguments.device_size)
    flags = {ON: (*OFF_FLAGS, *(arguments.on or ON_FLAGS)), OFF: OFF_FLAGS}
    report: dict[str, Any] = {"format": 1, "arguments": vars(arguments)}
    with torn_down() as stack:
        images, points = folders(stack, arguments.backing)
        devices = {
            name: stack.enter_context(loop_device(images / name, size_bytes)) for name in flags
        }
        for device in devices.values():
            run_tool(*KVFS, "mkfs", device)
        fill_holes(*(images / name for name in flags))
        sides = []
        for name, said in flags.items():
            (points / name).mkdir()
            sets = [word for one in said for word in ("--set", one)]
            stack.enter_context(
                kvfs_mount(devices[name], str(points / name), "passthrough", print, *sets)
            )
            sides.append(Side(name, devices[name], str(points / name)))
        crew = stack.enter_context(Crew(WRITERS, BLOCK_BYTES))
        blocks = int(size_bytes * arguments.share) // BLOCK_BYTES // WRITERS * WRITERS
        for direct in (True, False):
            _rounds(crew, sides, Load(blocks, direct), arguments.rounds)
            report["direct" if direct else "buffered"] = summary(sides)
    return report


def _rounds(crew: Crew, sides: list[Side], load: Load, rounds: int) -> None:
    for side in sides:  # the first one warms up
        one_round(crew, side, load, -1)
        side.rates, side.amplification, side.marked_in_round = [], [], []
    for number in range(rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            one_round(crew, side, load, number)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backing", default="/dev/shm", help="where both devices' files lie")
    parser.add_argument("--device-size", default="6G")
    parser.add_argument("--share", type=float, default=0.7, help="of a device, stored in a round")
    parser.add_argument("--on", action="append", metavar="NAME=VALUE", help="what alone is on")
    parser.add_argument("--rounds", type=int, default=7)
    print(json.dumps(run(parser.parse_args()), indent=1))


if __name__ == "__main__":
    main()
