"""What a power cut's loss window costs: ``python -m tests.bench.measure_durability``.

Run as root. Two pools of this tree on equal loop devices in memory: one makes blocks durable, logs
its index and sums blocks up; the other does none of it. Two writers store blocks of 32 MiB in each
in turns, with O_DIRECT and through the page cache. A round lasts four windows and counts the last
three, in which the pass works off what the writers store. Prints JSON: the rate with over the rate
without, and bytes written to each device for a byte stored. ``--control`` mounts both without,
which shows what the machine's noise alone makes of the ratio.
"""

import argparse
import json
import mmap
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvfs.bench.block_client import store
from kvfs.bench.daemon import KVFS
from kvfs.bench.jobs import spread
from kvfs.bench.self_made import (
    check_room,
    fill_holes,
    folders,
    kvfs_mount,
    loop_device,
    run_tool,
    torn_down,
)
from kvfs.core.sizes import parse_size

BACKING: Final = "/dev/shm"
WRITERS: Final = 2
BLOCK_BYTES: Final = 32 << 20
#: The rounds of a size that warm up and do not count.
_FIRST_ROUNDS: Final = 1
_WINDOWS: Final = 4
_SECTOR_BYTES: Final = 512
_WITHOUT: Final = ("durable_within_s=0", "index_log_s=0", "checksum_share=0", "verify=off")


class Side(NamedTuple):
    """One pool: where it is mounted, and its device."""

    mountpoint: Path
    device: str

    def written_bytes(self) -> int:
        """Return what the device was told to write so far."""
        fields = Path(f"/sys/class/block/{Path(self.device).name}/stat").read_text().split()
        return int(fields[6]) * _SECTOR_BYTES


def write_for(place: Path, writer: int, flags: int, window_s: float) -> tuple[int, int]:
    """Store for four windows; return the bytes stored in the last three, and in all."""
    counted = total = 0
    with mmap.mmap(-1, BLOCK_BYTES) as data:
        data[:] = os.urandom(1 << 20) * (BLOCK_BYTES >> 20)
        parts = [memoryview(data)]
        begun_s = time.monotonic()
        number = time.monotonic_ns()
        while (passed_s := time.monotonic() - begun_s) < _WINDOWS * window_s:
            name = f"{place}/{writer}-{number}"
            store(f"{name}.tmp", name, parts, flags)
            number, total = number + 1, total + BLOCK_BYTES
            counted += BLOCK_BYTES if passed_s >= window_s else 0
        parts[0].release()
    return counted, total


def sides(stack: ExitStack, size_bytes: int, window_s: float, *, control: bool) -> dict[str, Side]:
    """Mount one pool without and one with."""
    check_room(2 * size_bytes, BACKING)
    images, points = folders(stack, BACKING)
    with_all = (f"durable_within_s={window_s}", "index_log_s=1")
    settings = {"without": _WITHOUT, "with": _WITHOUT if control else with_all}
    devices = [stack.enter_context(loop_device(images / name, size_bytes)) for name in settings]
    for device in devices:
        run_tool(*KVFS, "mkfs", device)
    fill_holes(*(images / name for name in settings))
    found = {}
    for (name, values), device in zip(settings.items(), devices, strict=True):
        (points / name).mkdir()
        flags = [f"--set={value}" for value in values]
        stack.enter_context(kvfs_mount(device, str(points / name), "passthrough", print, *flags))
        found[name] = Side(points / name, device)
    return found


def compare(found: dict[str, Side], flags: int, rounds: int, window_s: float) -> dict[str, Any]:
    """Run *rounds* on both sides in turns."""
    rates: dict[str, list[float]] = {name: [] for name in found}
    stored = dict.fromkeys(found, 0)
    before = {name: side.written_bytes() for name, side in found.items()}
    with ProcessPoolExecutor(WRITERS, mp_context=get_context("spawn")) as crew:
        for turn in range(_FIRST_ROUNDS + rounds):
            for name, side in list(found.items())[:: -1 if turn % 2 else 1]:
                jobs = [
                    crew.submit(write_for, side.mountpoint, writer, flags, window_s)
                    for writer in range(WRITERS)
                ]
                done = [job.result() for job in jobs]
                stored[name] += sum(total for _, total in done)
                if turn >= _FIRST_ROUNDS:
                    counted_s = (_WINDOWS - 1) * window_s
                    rates[name].append(sum(counted for counted, _ in done) / counted_s)
                # What one side left behind is written before the other side's turn.
                run_tool(*KVFS, "sync", str(side.mountpoint))
    ratio = spread([b / a for a, b in zip(rates["without"], rates["with"], strict=True)])
    return {
        "with_over_without": round(ratio.median, 3),
        "quartiles": [round(ratio.lower_quarter, 3), round(ratio.upper_quarter, 3)],
        "bytes_per_s": {name: round(spread(rate).median) for name, rate in rates.items()},
        "written_per_stored": {
            name: round((side.written_bytes() - before[name]) / stored[name], 4)
            for name, side in found.items()
        },
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device-size", type=parse_size, default=4 << 30)
    parser.add_argument("--window-s", type=float, default=2.0)
    parser.add_argument("--control", action="store_true")
    given = parser.parse_args()
    with torn_down() as stack:
        found = sides(stack, given.device_size, given.window_s, control=given.control)
        for job, flags in {"o_direct": os.O_DIRECT, "page cache": 0}.items():
            figures = compare(found, flags, given.rounds, given.window_s)
            print(json.dumps({"job": job, "control": given.control, **figures}))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
