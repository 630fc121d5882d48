"""A pool of several drives beside one of a single drive: rates, CPU, drives of a chain; as JSON.

Run as root: ``python -m tests.bench.measure_drives [DRIVES [PAIRS [JOB...]]]``. Each drive is a
loop device in memory; the pool of one has as many bytes as the others together. A ratio above 1 is:
the pool of several drives is faster, or its server takes more CPU.

Then one process stores a chain of blocks and reads it with O_DIRECT: how many bytes come from each
drive is what the kernel counted (Documentation/block/stat.rst: sectors of 512 bytes).
"""

import json
import mmap
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from kvfs.bench.jobs import Effort, Job, JobKind, JobRuns, Mode, select_jobs
from kvfs.bench.self_made import check_room, fill_holes, folders, loop_device, torn_down
from kvfs.bench.sides import JobSide, run_jobs
from kvfs.core.sizes import GIB, MIB
from tests.bench.measure_commits import NEW, figures, kvfs, side_of

DRIVES: Final = 4
PAIRS: Final = 9
DRIVE_BYTES: Final = GIB
BACKING: Final = "/dev/shm"
#: As an inference server and its neighbours on eight GPUs load and store.
THREADS: Final = 16
CHAIN_BLOCKS: Final = 1000
CHAIN_BLOCK_BYTES: Final = MIB
_SECTOR_BYTES: Final = 512


def jobs_of(patterns: list[str]) -> list[Job]:
    """Return the jobs that *patterns* name; without any, those that a pool of drives is for."""
    if patterns:
        return select_jobs(patterns, full=True)
    modes, sizes = (Mode.BUFFERED, Mode.DIRECT), (4 * MIB, 32 * MIB)
    kinds = (JobKind.LOAD, JobKind.STORE)
    moves = [Job(k, THREADS, size, mode) for size in sizes for k in kinds for mode in modes]
    return [*moves, Job(JobKind.OPEN, 1)]


def pool(stack: ExitStack, name: str, images: list[Path], size_bytes: int, point: Path) -> JobSide:
    """Return a pool on new loop devices over *images*, mounted at *point*."""
    devices = [stack.enter_context(loop_device(image, size_bytes)) for image in images]
    kvfs(NEW, "mkfs", *devices)
    fill_holes(*images)
    print(f"{name}: {', '.join(devices)}", file=sys.stderr)
    return side_of(stack, NEW, ",".join(devices), point)


def bytes_read(images: list[Path]) -> list[int]:
    """Return how many bytes each loop device over *images* has read so far."""
    read: dict[str, int] = {}
    for device in Path("/sys/block").glob("loop*"):
        backing = device / "loop/backing_file"
        if backing.exists():
            sectors = int((device / "stat").read_text().split()[2])
            read[backing.read_text().strip()] = sectors * _SECTOR_BYTES
    return [read[str(image)] for image in images]


def read_of_a_chain(directory: Path, images: list[Path]) -> list[int]:
    """Return how many bytes of a chain come from each drive, in the order of *images*."""
    names = [directory / f"chain-{number:04}" for number in range(CHAIN_BLOCKS)]
    for name in names:
        draft = name.with_suffix(".tmp")
        draft.write_bytes(os.urandom(1) * CHAIN_BLOCK_BYTES)
        draft.rename(name)
    os.sync()
    before = bytes_read(images)
    for name in names:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECT)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            with mmap.mmap(-1, CHAIN_BLOCK_BYTES) as room:  # aligned, as O_DIRECT needs it
                assert os.preadv(fd, [room], 0) == CHAIN_BLOCK_BYTES
        finally:
            os.close(fd)
    return [after - at for at, after in zip(before, bytes_read(images), strict=True)]


def measure(drives: int, pairs: int, patterns: list[str]) -> dict[str, Any]:
    """Run the jobs on both pools in turns, then the chain on the one of several drives."""
    done: list[dict[str, Any]] = []
    with torn_down() as stack:
        check_room(2 * drives * DRIVE_BYTES, BACKING)
        made, points = folders(stack, BACKING)
        several = [made / f"drive-{number}" for number in range(drives)]
        one = pool(stack, "one", [made / "one"], drives * DRIVE_BYTES, points / "one")
        more = pool(stack, "several", several, DRIVE_BYTES, points / "several")

        def show(runs: JobRuns) -> None:
            done.append(figures(runs))
            print(json.dumps(done[-1]), file=sys.stderr)

        run_jobs(
            one,
            more,
            jobs_of(patterns),
            Effort(data_bytes=GIB, load_bytes=4 * GIB),
            range(pairs),
            start=lambda _: None,
            count=lambda: None,
            done=show,
        )
        chain = read_of_a_chain(points / "several", several)
    return {"drives": drives, "pairs": pairs, "jobs": done, "bytes_of_a_chain": chain}


def main() -> int:
    """Measure and print."""
    drives, pairs, *patterns = [*sys.argv[1:], *[str(DRIVES), str(PAIRS)][len(sys.argv[1:]) :]]
    print(json.dumps(measure(int(drives), int(pairs), patterns), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
