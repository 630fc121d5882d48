"""A comparison without preparation: two equal loop devices, one with an XFS and one with a pool.

mkfs discards, which makes the backing file sparse, and writes to a sparse file take three times as
long. So both files are filled after mkfs and before the mount.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from kvfs.bench.daemon import KVFS, environment, mount_status
from kvfs.client.dead_mount import wait_for_end
from kvfs.client.subprocesses import output_of, undisturbed
from kvfs.core.errors import BenchFailed, NotRoot, ToolMissing, UsageError
from kvfs.core.sizes import format_size
from kvfs.machine.hardware import available_memory_bytes

_TOOLS: Final = ("losetup", "mkfs.xfs", "mount", "umount")
#: Of all names that are made here, so that the remains of a killed run can be recognised.
_PREFIX: Final = "kvfs-bench-"
_ZEROS: Final = bytes(4 << 20)
#: For the page cache, the server and everybody else, besides the devices and the data.
_SPARE_BYTES: Final = 2 << 30
#: How long the server may take to stop.
_STOP_WAIT_S: Final = 10


#: Told how many bytes are filled, and how many are to be.
Filled = Callable[[int, int], None]


class Places(NamedTuple):
    """Where both sides are mounted."""

    baseline: str
    mount: str


@contextmanager
def self_made(
    size_bytes: int,
    backing: str,
    data_path: str,
    say: Callable[[str], None],
    filled: Filled | None = None,
) -> Iterator[Places]:
    """Yield both mounts, each on a device of *size_bytes* whose bytes lie in *backing*.

    Everything is taken down again, however this is left. *say* is called before each step, as steps
    take seconds, and *filled* during the longest. Raises ``NotRoot``, ``ToolMissing``,
    ``UsageError`` if memory or disk is too small, and ``BenchFailed`` if a step fails.
    """
    check_room(2 * size_bytes, backing)
    with torn_down() as stack:
        yield _make(stack, size_bytes, backing, data_path, say, filled)


@contextmanager
def torn_down() -> Iterator[ExitStack]:
    """Yield a stack that is unwound whole, however this is left."""
    with ExitStack() as stack:
        try:
            yield stack
        finally:
            with undisturbed():
                stack.close()


def folders(stack: ExitStack, backing: str) -> tuple[Path, Path]:
    """Return a new folder in *backing* for images and another one for mountpoints."""
    try:
        images = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=backing))
    except OSError as error:
        raise UsageError(f"--backing {backing}: {error.strerror}") from None
    stack.callback(shutil.rmtree, images, ignore_errors=True)
    # All mountpoints are siblings, so that all paths have the same number of steps.
    points = Path(tempfile.mkdtemp(prefix=_PREFIX))
    stack.callback(_remove_points, points)
    return images, points


def _make(
    stack: ExitStack,
    size_bytes: int,
    backing: str,
    data_path: str,
    say: Callable[[str], None],
    filled: Filled | None,
) -> Places:
    images, points = folders(stack, backing)
    places = Places(str(points / "xfs"), str(points / "kvfs"))
    for place in places:
        os.mkdir(place)

    say("making both file systems: mkfs.xfs with its defaults, and kvfs mkfs")
    baseline_device = stack.enter_context(loop_device(images / "xfs", size_bytes))
    kvfs_device = stack.enter_context(loop_device(images / "kvfs", size_bytes))
    run_tool("mkfs.xfs", "-q", baseline_device)
    run_tool(*KVFS, "mkfs", kvfs_device)
    say("filling their backing files")
    fill_holes(images / "xfs", images / "kvfs", filled=filled)
    stack.callback(unmount, places.baseline)
    run_tool("mount", "-t", "xfs", baseline_device, places.baseline)
    stack.enter_context(kvfs_mount(kvfs_device, places.mount, data_path, say))
    return places


def fill_holes(*images: Path, filled: Filled | None = None) -> None:
    """Write zeros into every hole of the files *images*, which does not change their content.

    *filled* is told after each piece how many bytes of all are done, and how many they are.

    They are filled in turns, piece by piece, so that each gets the same mix of memory. Filled one
    after the other, two equal devices differed by a third in O_DIRECT reads.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(open(image, "r+b", buffering=0)) for image in images]
        sizes_bytes = [os.fstat(file.fileno()).st_size for file in files]
        for start in range(0, max(sizes_bytes), len(_ZEROS)):
            end = start + len(_ZEROS)
            for file, size_bytes in zip(files, sizes_bytes, strict=True):
                _fill_piece(file.fileno(), start, min(end, size_bytes))
            if filled is not None:
                filled(sum(min(end, size_bytes) for size_bytes in sizes_bytes), sum(sizes_bytes))


def _fill_piece(fd: int, start: int, stop: int) -> None:
    while start < stop and (start := os.lseek(fd, start, os.SEEK_HOLE)) < stop:
        start += os.pwrite(fd, _ZEROS[: min(stop, _next_data(fd, start, stop)) - start], start)


def _next_data(fd: int, start: int, end: int) -> int:
    try:
        return os.lseek(fd, start, os.SEEK_DATA)
    except OSError:  # ENXIO: only a hole up to the end
        return end


def check_room(devices_bytes: int, backing: str, flag: str = "--device-size") -> None:
    """Raise NotRoot, ToolMissing or UsageError unless *devices_bytes* of devices can be made.

    *flag* is what the user may choose smaller.
    """
    if os.geteuid() != 0:
        raise NotRoot("--self-contained makes devices and mounts, which needs root")
    for tool in _TOOLS:
        if shutil.which(tool) is None:
            raise ToolMissing(f"--self-contained needs {tool}: install xfsprogs and util-linux")
    if not os.path.isdir(backing):
        raise UsageError(f"{backing} is not a directory")
    need_bytes = devices_bytes + _SPARE_BYTES
    have_bytes = room_for_devices(backing) + _SPARE_BYTES
    if have_bytes < need_bytes:
        raise UsageError(
            f"the devices need {format_size(need_bytes)} of memory and of space in {backing}, "
            f"only {format_size(have_bytes)} is available: choose a smaller {flag}"
        )


def room_for_devices(backing: str) -> int:
    """Return how many bytes of devices *backing* and the memory have room for; may be negative."""
    return min(free_bytes(backing), available_memory_bytes() or 0) - _SPARE_BYTES


def free_bytes(directory: str) -> int:
    """Return how many bytes the file system of *directory* can still take."""
    totals = os.statvfs(directory)
    return totals.f_bavail * totals.f_frsize


@contextmanager
def ballast(directory: str, room_bytes: int) -> Iterator[None]:
    """Leave *room_bytes* free in a file system: a file without a name takes the rest of it."""
    fd = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        surplus_bytes = free_bytes(directory) - room_bytes
        if surplus_bytes > 0:
            with contextlib.suppress(OSError):  # if it cannot, this side has more room
                os.posix_fallocate(fd, 0, surplus_bytes)
        yield
    finally:
        os.close(fd)


@contextmanager
def loop_device(image: Path, size_bytes: int) -> Iterator[str]:
    """Yield a loop device over the new file *image*, given back on leaving."""
    with open(image, "wb") as file:
        file.truncate(size_bytes)
    try:
        yield run_tool("losetup", "--find", "--show", str(image)).strip()
    finally:
        # By the file, not by the name: an interrupted losetup has not printed the name.
        listed = subprocess.run(
            ["losetup", "--noheadings", "--output", "NAME", "--associated", str(image)],
            check=False,
            capture_output=True,
            text=True,
        )
        for device in listed.stdout.split():
            subprocess.run(["losetup", "--detach", device], check=False, capture_output=True)


def run_tool(*argv: str) -> str:
    """Return what *argv* prints; raises ``BenchFailed`` with its message when it fails."""
    done = output_of(argv, environment())
    if done.returncode != 0:
        tool = "kvfs" if argv[: len(KVFS)] == KVFS else argv[0]
        raise BenchFailed(f"{tool} failed with exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def kvfs_mount(
    device: str, mountpoint: str, data_path: str, say: Callable[[str], None], *flags: str
) -> Iterator[None]:
    """Keep *device* mounted, with more *flags*; afterwards its server is gone, too."""
    pidfd = -1
    try:
        run_tool(*KVFS, "mount", f"--data-path={data_path}", *flags, device, mountpoint)
        pidfd = os.pidfd_open(int(mount_status(mountpoint)["server_pid"]))
        yield
    finally:
        stop = [*KVFS, "umount", "--wait-s", str(_STOP_WAIT_S), mountpoint]
        subprocess.run(stop, env=environment(), check=False, capture_output=True)
        unmount(mountpoint)
        if pidfd >= 0:
            _end(pidfd, say)


def _end(pidfd: int, say: Callable[[str], None]) -> None:
    """Kill a server that outlived its mount: it would keep the device and its memory for ever."""
    if not wait_for_end(pidfd, 0):
        say(f"the kvfs server had not stopped after {_STOP_WAIT_S} s and was killed")
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        wait_for_end(pidfd, _STOP_WAIT_S)
    os.close(pidfd)


def unmount(mountpoint: str) -> None:
    """Unmount *mountpoint* if anything is mounted there, lazily if necessary."""
    for flags in ([], ["--lazy"]):
        if not os.path.ismount(mountpoint):
            return
        subprocess.run(["umount", *flags, mountpoint], check=False, capture_output=True)


def _remove_points(points: Path) -> None:
    # Never removed recursively: if a mount is left, its files are not ours to delete.
    for point in (*points.iterdir(), points):
        try:
            os.rmdir(point)
        except OSError:
            return
