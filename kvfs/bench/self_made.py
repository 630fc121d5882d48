"""A comparison that needs nothing: two equal loop devices, an XFS on one and a pool on the other.

mkfs discards, which makes a backing file sparse, and a sparse one answers writes three times slower
than a full one; so both are written full after their file system was made, before it is mounted.
"""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from kvfs.bench.daemon import KVFS
from kvfs.errors import BenchFailed, NotRoot, ToolMissing, UsageError
from kvfs.sizes import format_size

_TOOLS: Final = ("losetup", "mkfs.xfs", "mount", "umount")
#: Of everything that is made, so that what a killed run left behind is known again.
_PREFIX: Final = "kvfs-bench-"
_ZEROS: Final = bytes(4 << 20)
#: For the page cache, the server and everybody else, on top of the devices and the data.
_SPARE_BYTES: Final = 2 << 30


class Places(NamedTuple):
    """Where both sides are mounted."""

    baseline: str
    mount: str


@contextmanager
def self_made(
    size_bytes: int, backing: str, data_path: str, say: Callable[[str], None]
) -> Iterator[Places]:
    """Yield both mounts, each on a device of *size_bytes* whose bytes lie in *backing*.

    Everything is taken down again however this is left. *say* is told of each step, for they take
    seconds. Raises ``NotRoot``, ``ToolMissing``, ``UsageError`` when memory or disk is too small,
    and ``BenchFailed`` when a step fails.
    """
    _check(size_bytes, backing)
    with ExitStack() as stack:
        try:
            yield _make(stack, size_bytes, backing, data_path, say)
        finally:
            # A second Ctrl-C must not leave half of it standing.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)


def _make(
    stack: ExitStack, size_bytes: int, backing: str, data_path: str, say: Callable[[str], None]
) -> Places:
    images = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=backing))
    stack.callback(shutil.rmtree, images, ignore_errors=True)
    # Both mountpoints are siblings, so that both paths are walked in as many steps.
    points = Path(tempfile.mkdtemp(prefix=_PREFIX))
    stack.callback(_remove_points, points)
    places = Places(str(points / "xfs"), str(points / "kvfs"))
    for place in places:
        os.mkdir(place)

    say("making the baseline: mkfs.xfs with its defaults")
    device = stack.enter_context(_loop_device(images / "xfs", size_bytes))
    _run("mkfs.xfs", "-q", device)
    say("writing its backing file full")
    fill_holes(images / "xfs")
    stack.callback(_unmount, places.baseline)
    _run("mount", "-t", "xfs", device, places.baseline)

    say("making the pool: kvfs mkfs")
    device = stack.enter_context(_loop_device(images / "kvfs", size_bytes))
    _run(*KVFS, "mkfs", device)
    say("writing its backing file full")
    fill_holes(images / "kvfs")
    stack.callback(_unmount_kvfs, places.mount)
    _run(*KVFS, "mount", f"--data-path={data_path}", device, places.mount)
    return places


def fill_holes(image: Path) -> None:
    """Write zeros into every hole of the file *image*, which reads as before."""
    with open(image, "r+b", buffering=0) as file:
        fd = file.fileno()
        end, start = os.fstat(fd).st_size, 0
        while start < end:
            start = os.lseek(fd, start, os.SEEK_HOLE)
            stop = _next_data(fd, start, end)
            while start < stop:
                start += os.pwrite(fd, _ZEROS[: stop - start], start)


def _next_data(fd: int, start: int, end: int) -> int:
    try:
        return os.lseek(fd, start, os.SEEK_DATA)
    except OSError:  # ENXIO: nothing but a hole up to the end
        return end


def _check(size_bytes: int, backing: str) -> None:
    if os.geteuid() != 0:
        raise NotRoot("--self-contained makes devices and mounts, which needs root")
    for tool in _TOOLS:
        if shutil.which(tool) is None:
            raise ToolMissing(f"--self-contained needs {tool}: install xfsprogs and util-linux")
    if not os.path.isdir(backing):
        raise UsageError(f"{backing} is no directory")
    need_bytes = 2 * size_bytes + _SPARE_BYTES
    free = os.statvfs(backing)
    have_bytes = min(free.f_bavail * free.f_frsize, _available_memory_bytes())
    if have_bytes < need_bytes:
        raise UsageError(
            f"--self-contained needs {format_size(need_bytes)} of memory and of room in {backing}, "
            f"and there are {format_size(have_bytes)}: say a smaller --device-size"
        )


def _available_memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


@contextmanager
def _loop_device(image: Path, size_bytes: int) -> Iterator[str]:
    with open(image, "wb") as file:
        file.truncate(size_bytes)
    try:
        yield _run("losetup", "--find", "--show", str(image)).strip()
    finally:
        # By the file, not by the name: an interrupted losetup has not told the name.
        listed = subprocess.run(
            ["losetup", "--noheadings", "--output", "NAME", "--associated", str(image)],
            check=False,
            capture_output=True,
            text=True,
        )
        for device in listed.stdout.split():
            subprocess.run(["losetup", "--detach", device], check=False, capture_output=True)


def _run(*argv: str) -> str:
    # Files, not pipes: a server in the background may keep its standard output open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        code = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, check=False
        ).returncode
        out.seek(0)
        err.seek(0)
        if code != 0:
            tool = "kvfs" if argv[: len(KVFS)] == KVFS else argv[0]
            raise BenchFailed(f"{tool} failed with exit code {code}: {err.read().strip()}")
        return out.read()


def _unmount_kvfs(mountpoint: str) -> None:
    subprocess.run([*KVFS, "umount", mountpoint], check=False, capture_output=True)
    _unmount(mountpoint)


def _unmount(mountpoint: str) -> None:
    for flags in ([], ["--lazy"]):
        if not os.path.ismount(mountpoint):
            return
        subprocess.run(["umount", *flags, mountpoint], check=False, capture_output=True)


def _remove_points(points: Path) -> None:
    # Never a recursive removal: should a mount have stayed, its files are not ours to delete.
    for point in (*points.iterdir(), points):
        try:
            os.rmdir(point)
        except OSError:
            return
