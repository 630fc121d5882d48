"""What reading ahead along a chain brings: ``python -m tests.bench.measure_prefetch``.

Run as root. Mounts two new pools on drives that are files in a directory, read without the page
cache: one with ``prefetch`` off and one with ``learned``. A client loads the blocks of a chain in
order, each time from the drive, in pairs whose order changes. Prints JSON. Not collected by pytest.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kvfs.core.sizes import parse_size
from tests.support.kernel.caches import forget_blocks
from tests.support.mounts.mounting import Mounted, run_kvfs

#: Loads after which a link counts.
_LEARNS: Final = 2
_POOL_BYTES: Final = 600 << 20


@contextlib.contextmanager
def _drive(image: Path, size_bytes: int) -> Iterator[str]:
    """Yield a loop device over the new file *image*, whose pages are not kept in memory twice."""
    with image.open("wb") as file:
        file.truncate(size_bytes)
    shown = subprocess.run(
        ["losetup", "--find", "--show", "--direct-io=on", str(image)],
        check=True,
        capture_output=True,
        text=True,
    )
    device = shown.stdout.strip()
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


def _load_s(mount: Mounted, blocks: int, block_bytes: int, pause_s: float) -> float:
    """Load the chain from the drive; return how long it waited for bytes (s)."""
    forget_blocks(mount)
    waited_s, room = 0.0, bytearray(block_bytes)
    for number in range(blocks):
        begun_s = time.perf_counter()
        with (mount.path / f"{number}").open("rb", 0) as file:
            assert file.readinto(room) == block_bytes
        waited_s += time.perf_counter() - begun_s
        assert room[0] == number % 251
        time.sleep(pause_s)  # what a client does with a block; no test runs this
    return waited_s


def _measure(given: argparse.Namespace, place: Path) -> dict[str, Any]:
    mounts: dict[str, Mounted] = {}
    loads: dict[str, list[float]] = {"off": [], "learned": []}
    size_bytes = given.blocks * given.block
    with contextlib.ExitStack() as stack:
        for how in loads:
            device = stack.enter_context(_drive(place / how, size_bytes + _POOL_BYTES))
            flags = (f"--set=prefetch={how}", f"--data-path={given.data_path}")
            mounts[how] = mount = stack.enter_context(Mounted(device, place / f"kv-{how}", *flags))
            for number in range(given.blocks):
                (mount.path / "tmp").write_bytes(bytes([number % 251]) * given.block)
                (mount.path / "tmp").rename(mount.path / f"{number}")
            run_kvfs("sync", str(mount.path))
        for turn in range(_LEARNS + given.rounds):
            for how in sorted(loads, reverse=turn % 2 == 1):
                took_s = _load_s(mounts[how], given.blocks, given.block, given.pause_ms / 1000)
                if turn >= _LEARNS:
                    loads[how].append(took_s)
        told = mounts["learned"].status()["prefetch"]
    ratios = sorted(one / other for one, other in zip(*loads.values(), strict=True))
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "blocks": given.blocks,
        "block_bytes": given.block,
        "pause_ms": given.pause_ms,
        "data_path": given.data_path,
        "off_mb_per_s": round(size_bytes / 1e6 / statistics.median(loads["off"]), 1),
        "learned_mb_per_s": round(size_bytes / 1e6 / statistics.median(loads["learned"]), 1),
        "off_over_learned": [round(ratio, 3) for ratio in quartiles],
        "prefetch": told,
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--block", type=parse_size, default=1 << 20, metavar="SIZE")
    parser.add_argument("--pause-ms", type=float, default=0.0, help="between two blocks")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--data-path", default="auto", choices=("auto", "daemon", "passthrough"))
    parser.add_argument("--place", help="a directory on the drive to measure")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.place) as place:
        print(json.dumps(_measure(given, Path(place)), indent=1))


if __name__ == "__main__":
    assert os.geteuid() == 0, "run it as root"
    main()
