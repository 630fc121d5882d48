"""What an encrypted pool costs: loads and stores of a drive, plain and with a key, as JSON.

``python -m tests.bench.measure_encryption DRIVE`` makes a pool on DRIVE each way in turn. **Its
content is lost.** Blocks are stored and synced, and loaded after a new mount, so from the drive.
CPU is that of the whole machine, which should do nothing else.

``python -m tests.bench.measure_encryption --guest 6.12`` does it in a guest with that kernel of
Debian's, where this machine has no dm-crypt. Emulated, AES takes many times as long as it does by a
processor's own instructions: such figures say that it works, and nothing of a real drive.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.support.machines.kernels import kernel
from tests.support.machines.vm import accelerator, boot
from tests.support.mounts.mounting import Mounted, run_kvfs

ROUNDS: Final = 3
BLOCKS: Final = int(os.environ.get("KVFS_BLOCKS", "64"))
BLOCK_BYTES: Final = 4 << 20
GUEST_WAIT_S: Final = 7200.0
GUEST_DRIVE_BYTES: Final = 1 << 30
WAYS: Final = {"plain": (), "ephemeral": ("--encrypt=ephemeral",)}


def busy_s() -> float:
    """Return the seconds of CPU that this machine has spent, by proc_stat(5)."""
    user, nice, system, _, _, irq, softirq, *_ = (
        int(word) for word in Path("/proc/stat").read_text().split(maxsplit=11)[1:11]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def timed(call: Callable[[], object]) -> dict[str, float]:
    """Return how fast *call* handles all blocks, and the CPU that each GB takes."""
    cpu_s, begun_s = busy_s(), time.monotonic()
    call()
    wall_s, cpu_s = time.monotonic() - begun_s, busy_s() - cpu_s
    gigabytes = BLOCKS * BLOCK_BYTES / 1e9
    return {"gb_per_s": round(gigabytes / wall_s, 4), "cpu_s_per_gb": round(cpu_s / gigabytes, 3)}


def measure(drive: str, place: Path, flags: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Return the figures of stores and loads of a pool made with *flags*."""
    data = os.urandom(BLOCK_BYTES)
    run_kvfs("mkfs", drive, "--force", *flags)

    def store(path: Path) -> None:
        for number in range(BLOCKS):
            (path / f"{number}").write_bytes(data)
        run_kvfs("sync", str(path))

    def load(path: Path) -> None:
        for number in range(BLOCKS):
            assert (path / f"{number}").read_bytes() == data

    with Mounted(drive, place / "kv") as mounted:
        stored = timed(lambda: store(mounted.path))
    with Mounted(drive, place / "kv") as mounted:
        loaded = timed(lambda: load(mounted.path))
    run_kvfs("destroy", drive, "--yes")
    return {"store": stored, "load": loaded}


def in_guest(series: str) -> None:
    """Do it all on a drive of a guest, and print its lines."""
    with tempfile.TemporaryDirectory() as place:
        drive, out = Path(place) / "drive", Path(place) / "out"
        with drive.open("wb") as file:
            file.truncate(GUEST_DRIVE_BYTES)
        out.mkdir()
        ran = boot(
            kernel(series),
            out,
            *("-m", "tests.bench.measure_encryption", "/dev/vdb"),
            wait_s=GUEST_WAIT_S,
            drives=[drive],
            environment={"KVFS_BLOCKS": f"{BLOCKS}"},
            modules=("fuse", "dm_crypt", "xfs"),
        )
        for line in ran.console.read_text(errors="replace").splitlines():
            if line.startswith('{"round"'):
                told = {**json.loads(line), "linux": series, "accelerator": accelerator()}
                print(json.dumps(told), flush=True)
        assert ran.status == 0, ran.last_lines()


def main(drive: str) -> None:
    """Measure in alternation, and print a line for each."""
    with tempfile.TemporaryDirectory() as place:
        for turn in range(ROUNDS):
            for way, flags in WAYS.items():
                figures = measure(drive, Path(place), flags)
                told = {"round": turn, "pool": way, "blocks": BLOCKS, **figures}
                print(json.dumps(told), flush=True)


if __name__ == "__main__":
    in_guest(sys.argv[2]) if sys.argv[1] == "--guest" else main(sys.argv[1])
