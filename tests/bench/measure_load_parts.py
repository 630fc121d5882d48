"""Which part of a load is system calls and copying, and which part waits for the device.

Run as root: ``python -m tests.bench.measure_load_parts [--sizes 4M,32M] [--rounds 5]``: JSON, and a
table on stderr.

Equal loop devices hold the same blocks: an XFS, a pool on passthrough, a pool whose server moves
the bytes. One thread loads each block (open, read, close) into memory that it had before: through
the page cache, by O_DIRECT, by io_uring with registered buffers, and by a mapping that is copied
from. The page cache is dropped before, or holds the blocks. Some bytes of each load are compared.

Time is divided by what the kernel counts: processor time of the client and of the server (exact),
time in which the client wanted a core and had none, and the rest, in which it waited for the device
or the server.
"""

import argparse
import json
import mmap
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from operator import add, sub
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

import kvfs
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
from kvfs.core.errors import BenchFailed
from kvfs.core.sizes import MIB, format_size, parse_size
from tests.support.kernel.uring import Ring

XFS: Final = "XFS"
#: Places by name, with the data path of each.
PLACES: Final = {XFS: "", "kvfs": "passthrough", "kvfs, daemon path": "daemon"}
#: What a ring is asked for at once: the device works on all pieces of a block together.
_PIECE_BYTES: Final = MIB
_DROP_CACHES: Final = Path("/proc/sys/vm/drop_caches")
#: Seconds of processor time, seconds in which it wanted a core, time slices (proc_pid_schedstat).
_SCHEDSTAT: Final = Path("/proc/thread-self/schedstat")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
#: The server's time in kernel mode, in ticks, behind the name in brackets (proc_pid_stat(5)).
_STIME: Final = 12


class Plan(NamedTuple):
    """What is loaded, and how often."""

    sizes_bytes: tuple[int, ...]
    blocks: int
    rounds: int
    device_bytes: int
    backing: str
    paths: tuple[str, ...]


class Side(NamedTuple):
    """One place with the blocks; *daemon* serves it, if any."""

    name: str
    directory: Path
    daemon: Daemon | None


class Times(NamedTuple):
    """What some loads took together, in seconds.

    ``client_s`` and ``server_s`` are processor time. The kernel samples which part of it was in its
    own mode: ``client_sys_s``, ``server_sys_s``. ``queued_s``: the client wanted a core.
    """

    wall_s: float
    client_s: float
    client_sys_s: float
    server_s: float
    server_sys_s: float
    queued_s: float


class Reader:
    """Loads blocks of up to *size_bytes* into one piece of memory."""

    def __init__(self, stack: ExitStack, size_bytes: int) -> None:
        self.memory = mmap.mmap(-1, size_bytes)
        self.memory.write(b"\1" * size_bytes)
        self.ring = stack.enter_context(Ring())
        self.ring.register(self.memory)
        self._view = memoryview(self.memory)
        #: System calls so far, beside open and close.
        self.calls = 0

    def read(self, fd: int, size_bytes: int) -> None:
        """Read a block by as few calls of pread(2) as the kernel allows."""
        done_bytes = 0
        while done_bytes < size_bytes:
            self.calls += 1
            came = os.preadv(fd, [self._view[done_bytes:size_bytes]], done_bytes)
            if not came:
                raise BenchFailed("a block is short")
            done_bytes += came

    def submit(self, fd: int, size_bytes: int) -> None:
        """Read a block by one call of io_uring_enter(2)."""
        self.calls += 1
        if self.ring.read_fixed(fd, size_bytes, _PIECE_BYTES) != size_bytes:
            raise BenchFailed("a block is short")

    def map(self, fd: int, size_bytes: int) -> None:
        """Map a block, and copy it out of the mapping; its page faults are no calls."""
        self.calls += 2
        with mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ) as mapped:
            self._view[:size_bytes] = memoryview(mapped)


class Way(NamedTuple):
    """A way to load."""

    name: str
    flags: int
    load: Callable[[Reader, int, int], None]
    #: Whether the page cache may have the block.
    warm: bool


WAYS: Final = (
    Way("buffered", 0, Reader.read, warm=False),
    Way("mapped", 0, Reader.map, warm=False),
    Way("O_DIRECT", os.O_DIRECT, Reader.read, warm=False),
    Way("io_uring", os.O_DIRECT, Reader.submit, warm=False),
    Way("buffered", 0, Reader.read, warm=True),
    Way("mapped", 0, Reader.map, warm=True),
)


def content(size_bytes: int, number: int) -> bytes:
    """Return the bytes of a block."""
    return bytes([number + 2]) * size_bytes


def store(side: Side, plan: Plan) -> None:
    """Store all blocks as connectors do."""
    for size_bytes in plan.sizes_bytes:
        for number in range(plan.blocks):
            name = side.directory / f"{size_bytes}-{number}"
            draft = name.with_suffix(".tmp")
            draft.write_bytes(content(size_bytes, number))
            draft.rename(name)


class Clock:
    """What this process has spent: processor time, that in kernel mode, time without a core (s)."""

    def __init__(self, stack: ExitStack) -> None:
        self._schedstat = os.open(_SCHEDSTAT, os.O_RDONLY)
        stack.callback(os.close, self._schedstat)

    def now_s(self) -> tuple[float, float, float]:
        """Return all three. Threads of the kernel that work for a ring count, too."""
        sys_s = resource.getrusage(resource.RUSAGE_SELF).ru_stime
        queued_s = int(os.pread(self._schedstat, 100, 0).split()[1]) / 1e9
        return time.process_time(), sys_s, queued_s


def server_now_s(daemon: Daemon | None) -> tuple[float, float]:
    """Return the server's processor time, and that in kernel mode, which is sampled."""
    if daemon is None:
        return 0.0, 0.0
    fields = Path(f"/proc/{daemon.pid}/stat").read_text().rpartition(")")[2].split()
    return daemon.cpu_ns() / 1e9, int(fields[_STIME]) / _TICKS_PER_S


def series(
    reader: Reader, clock: Clock, side: Side, way: Way, size_bytes: int, blocks: int
) -> Times:
    """Load each block once, and return what that took."""
    names = [side.directory / f"{size_bytes}-{number}" for number in range(blocks)]
    if way.warm:
        for name in names:
            name.read_bytes()
    else:
        _DROP_CACHES.write_text("1")
    if side.daemon is not None:
        side.daemon.settle()
    wall_s = client_s = client_sys_s = queued_s = 0.0
    server_before = server_now_s(side.daemon)
    for number, name in enumerate(names):
        before, begun_s = clock.now_s(), time.perf_counter()
        fd = os.open(name, os.O_RDONLY | way.flags)
        way.load(reader, fd, size_bytes)
        os.close(fd)
        wall_s += time.perf_counter() - begun_s
        parts = [new - old for new, old in zip(clock.now_s(), before, strict=True)]
        client_s, client_sys_s, queued_s = map(add, (client_s, client_sys_s, queued_s), parts)
        _require_right(reader, size_bytes, number)
    server_s, server_sys_s = map(sub, server_now_s(side.daemon), server_before)
    return Times(wall_s, client_s, client_sys_s, server_s, server_sys_s, queued_s)


def _require_right(reader: Reader, size_bytes: int, number: int) -> None:
    ends = reader.memory[0], reader.memory[size_bytes // 2], reader.memory[size_bytes - 1]
    if set(ends) != {content(1, number)[0]}:
        raise BenchFailed(f"block {number} of {format_size(size_bytes)} has other bytes")


def copy_s(size_bytes: int) -> float:
    """Return what one copy from memory to memory takes: the least of some."""
    source, target = mmap.mmap(-1, size_bytes), mmap.mmap(-1, size_bytes)
    source.write(b"\1" * size_bytes)
    took = []
    for _ in range(5):
        begun_s = time.process_time()
        memoryview(target)[:] = memoryview(source)
        took.append(time.process_time() - begun_s)
    return min(took)


def run(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """Make everything, run all rounds, and return the report. Raises what ``self_made`` raises."""
    names = [name for name in PLACES if name == XFS or PLACES[name] in plan.paths]
    check_room(len(names) * plan.device_bytes, plan.backing)
    found: dict[tuple[int, str, Way], list[Times]] = {}
    calls: dict[tuple[int, str, Way], float] = {}
    with torn_down() as stack:
        sides = list(_make(stack, plan, names, say))
        for side in sides:
            store(side, plan)
        os.sync()
        reader, clock = Reader(stack, max(plan.sizes_bytes)), Clock(stack)
        for number in range(plan.rounds):
            say(f"round {number + 1} of {plan.rounds}")
            for size_bytes in plan.sizes_bytes:
                for side in sides if number % 2 == 0 else sides[::-1]:
                    for way in WAYS:
                        key, before = (size_bytes, side.name, way), reader.calls
                        took = series(reader, clock, side, way, size_bytes, plan.blocks)
                        found.setdefault(key, []).append(took)
                        calls[key] = 2 + (reader.calls - before) / plan.blocks
    return {
        "format": 1,
        "kvfs": kvfs.__version__,
        "plan": plan._asdict(),
        "copy_s": {format_size(size): round(copy_s(size), 6) for size in plan.sizes_bytes},
        "rows": [_row(*key, plan, calls[key], rounds) for key, rounds in found.items()],
    }


def _row(
    size_bytes: int, place: str, way: Way, plan: Plan, calls: float, rounds: Sequence[Times]
) -> dict[str, Any]:
    """Return the medians over the rounds, of one load; sampled shares are of all rounds."""

    def of(value: Callable[[Times], float]) -> float:
        return round(statistics.median(map(value, rounds)) / plan.blocks, 7)

    def share(part: Callable[[Times], float], whole: Callable[[Times], float]) -> float:
        total = sum(map(whole, rounds))
        return round(min(1.0, sum(map(part, rounds)) / total), 2) if total else 0.0

    return {
        "bytes": size_bytes,
        "place": place,
        "way": way.name,
        "cache": "warm" if way.warm else "cold",
        "loads": plan.blocks * len(rounds),
        "calls": round(calls, 1),
        "wall_s": of(lambda took: took.wall_s),
        "client_s": of(lambda took: took.client_s),
        "client_sys_share": share(lambda took: took.client_sys_s, lambda took: took.client_s),
        "server_s": of(lambda took: took.server_s),
        "server_sys_share": share(lambda took: took.server_sys_s, lambda took: took.server_s),
        "queued_s": of(lambda took: took.queued_s),
        "waits_s": of(lambda took: max(0.0, took.wall_s - took.client_s - took.queued_s)),
    }


def _make(
    stack: ExitStack, plan: Plan, names: Sequence[str], say: Callable[[str], None]
) -> Iterator[Side]:
    images, points = folders(stack, plan.backing)
    say("making the devices, and writing their backing files full")
    devices = {
        name: stack.enter_context(loop_device(images / f"{number}", plan.device_bytes))
        for number, name in enumerate(names)
    }
    for name, device in devices.items():
        run_tool(*(("mkfs.xfs", "-q") if name == XFS else (*KVFS, "mkfs")), device)
    fill_holes(*(images / f"{number}" for number in range(len(names))))
    for number, (name, device) in enumerate(devices.items()):
        point = points / f"{number}"
        point.mkdir()
        daemon = None
        if name == XFS:
            stack.callback(unmount, str(point))
            run_tool("mount", "-t", "xfs", device, str(point))
        else:
            stack.enter_context(kvfs_mount(device, str(point), PLACES[name], say))
            daemon = Daemon(int(mount_status(str(point))["server_pid"]))
        (point / "blocks").mkdir()
        yield Side(name, point / "blocks", daemon)


def table_of(report: dict[str, Any]) -> Table:
    """Return a line for each row."""
    table = Table(title="One load; medians over the rounds", box=box.SIMPLE_HEAD)
    for heading in ("block", "place", "way"):
        table.add_column(heading, no_wrap=True)
    for heading in ("GB/s", "takes us", "client CPU", "server CPU", "waits", "no core", "calls"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report["rows"]:
        table.add_row(
            format_size(row["bytes"]),
            row["place"],
            f"{row['way']}, {row['cache']}",
            f"{row['bytes'] / row['wall_s'] / 1e9:.1f}",
            *(
                f"{1e6 * row[key]:,.0f}"
                for key in ("wall_s", "client_s", "server_s", "waits_s", "queued_s")
            ),
            f"{row['calls']:g}",
        )
    return table


def main() -> None:
    """Run the rounds; print the report and its table."""
    parser = argparse.ArgumentParser(prog="measure_load_parts", allow_abbrev=False)
    flag = parser.add_argument
    flag("--sizes", default="4M,32M", help="of blocks, at most 64M (default 4M,32M)")
    flag("--blocks", type=int, default=8, help="of each size (default 8)")
    flag("--rounds", type=int, default=5, help="(default 5)")
    flag("--device-size", type=parse_size, default="1G", help="of each device (default 1G)")
    flag("--backing", default="/dev/shm", help="where they lie (default /dev/shm)")
    flag("--data-paths", default="passthrough,daemon", help="of the pools (default both)")
    args = parser.parse_args()
    plan = Plan(
        sizes_bytes=tuple(map(parse_size, args.sizes.split(","))),
        blocks=args.blocks,
        rounds=args.rounds,
        device_bytes=args.device_size,
        backing=args.backing,
        paths=tuple(args.data_paths.split(",")),
    )
    notes = Console(stderr=True, highlight=False, width=104)
    try:
        measured = run(plan, notes.print)
    except BenchFailed as error:
        sys.exit(f"measure_load_parts: {error}")
    notes.print(table_of(measured))
    print(json.dumps(measured, indent=1))


if __name__ == "__main__":
    main()
