"""The sides of a replay: directories of equal room on a kvfs mount and beside a cleaner."""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NamedTuple

from kvfs.bench.daemon import KVFS, Daemon, mount_status
from kvfs.bench.replay.cleaner import Habits, Script
from kvfs.bench.self_made import (
    Filled,
    ballast,
    check_room,
    fill_holes,
    folders,
    free_bytes,
    kvfs_mount,
    loop_device,
    room_for_devices,
    run_tool,
    torn_down,
    unmount,
)
from kvfs.core.errors import BenchFailed, NotMounted, UsageError
from kvfs.core.sizes import MIB, format_size
from kvfs.core.types import PAGE_BYTES
from kvfs.machine.mount_table import FS_TYPE, mount_of

#: What a device needs besides the room for blocks: a journal, an index, and a share for the rest.
_DEVICE_EXTRA_BYTES: Final = 320 * MIB
_DEVICE_SHARE: Final = 1.06
#: The usual block of a model that is spread over GPUs, and what most connectors store at least.
BLOCK_BYTES: Final = MIB


class ReplaySide(NamedTuple):
    """Where prompts are served; *device* is a path on the device that is written to."""

    name: str
    directory: str
    device: str
    daemon: Daemon | None
    script: Script | None


class Sides(NamedTuple):
    """All sides, and the room for blocks that each has."""

    sides: list[ReplaySide]
    room_bytes: int


class SelfMade(NamedTuple):
    """What to make: a pool for each eviction policy, an XFS for each set of habits."""

    room_bytes: int
    backing: str
    policies: Sequence[str]
    baseline_options: str
    data_path: str


def block_bytes_for(blocks: int, sides: int, backing: str) -> int:
    """Return the size of a block when *blocks* of them are to fit on each of *sides* devices.

    That is BLOCK_BYTES, or less if *backing* and the memory have no room for so much.
    """
    device_bytes = room_for_devices(backing) // sides - _DEVICE_EXTRA_BYTES
    most_bytes = int(max(0, device_bytes) / _DEVICE_SHARE / max(1, blocks))
    return min(BLOCK_BYTES, most_bytes // PAGE_BYTES * PAGE_BYTES)


@contextmanager
def self_made(
    plan: SelfMade,
    habits: Sequence[Habits],
    *,
    waits: bool,
    say: Callable[[str], None],
    filled: Filled,
) -> Iterator[Sides]:
    """Yield new pools and XFS file systems on equal loop devices, taken down again afterwards.

    *say* and *filled* are told what happens. Raises what ``kvfs.bench.self_made`` raises.
    """
    device_bytes = int(plan.room_bytes * _DEVICE_SHARE) + _DEVICE_EXTRA_BYTES
    pools = [f"kvfs, {policy}" for policy in plan.policies]
    cleaned = [_name("XFS", each) for each in habits]
    check_room(
        (len(pools) + len(cleaned)) * device_bytes, plan.backing, "--block-size or --blocks-share"
    )
    with torn_down() as stack:
        images, points = folders(stack, plan.backing)
        files = [images / f"device-{number}" for number, _ in enumerate(pools + cleaned)]
        devices = [stack.enter_context(loop_device(file, device_bytes)) for file in files]
        say(f"making {len(pools)} pools and {len(cleaned)} XFS of {format_size(device_bytes)}")
        for device in devices[: len(pools)]:
            run_tool(*KVFS, "mkfs", device)
        for device in devices[len(pools) :]:
            run_tool("mkfs.xfs", "-q", device)
        fill_holes(*files, filled=filled)
        sides = []
        for name, policy, device in zip(pools, plan.policies, devices, strict=False):
            point = _new(str(points / device.rpartition("/")[2]))
            flags = (f"--capacity={plan.room_bytes}", "--set", f"eviction={policy}")
            stack.enter_context(kvfs_mount(device, point, plan.data_path, say, *flags))
            sides.append(_kvfs_side(name, point, _new(f"{point}/blocks"), plan.room_bytes))
        options = ["-o", plan.baseline_options] if plan.baseline_options else []
        for name, each, device in zip(cleaned, habits, devices[len(pools) :], strict=True):
            point = _new(str(points / device.rpartition("/")[2]))
            stack.callback(unmount, point)
            run_tool("mount", "-t", "xfs", *options, device, point)
            stack.enter_context(ballast(point, plan.room_bytes))
            directory = _new(f"{point}/blocks")
            script = stack.enter_context(Script(directory, plan.room_bytes, each, waits=waits))
            sides.append(ReplaySide(name, directory, device, None, script))
        yield Sides(sides, plan.room_bytes)


@contextmanager
def on_mounts(mount: str, baseline: str, habits: Habits, *, waits: bool) -> Iterator[Sides]:
    """Yield new directories on a kvfs mount and on another file system, removed afterwards.

    The room is the pool's capacity. If the other file system has more, a file without a name takes
    the rest. Raises ``UsageError`` if it has less, and ``NotMounted`` if *mount* is no kvfs.
    """
    for place in (mount, baseline):
        if not os.path.isdir(place):
            raise UsageError(f"{place} is not a directory")
    found, other = mount_of(os.path.realpath(mount)), mount_of(os.path.realpath(baseline))
    if found is None or found.fs_type != FS_TYPE:
        raise NotMounted(f"{mount} is not on a kvfs mount")
    if other is not None and other.fs_type == FS_TYPE:
        raise UsageError(f"{baseline} is on a kvfs mount, too: the baseline is another file system")
    room_bytes = int(mount_status(found.mountpoint)["usable_bytes"])
    if (have_bytes := free_bytes(baseline)) < room_bytes:
        raise UsageError(
            f"{mount} has room for {format_size(room_bytes)} of blocks, {baseline} only for "
            f"{format_size(have_bytes)}: empty it, or mount the pool with a smaller --capacity"
        )
    name = f"kvfs-replay-{os.getpid()}-{time.monotonic_ns():x}"
    with ExitStack() as stack:
        directories = []
        for place in (mount, baseline):
            directory = os.path.join(os.path.abspath(place), name)
            try:
                directories.append(_new(directory))
            except OSError as error:
                raise UsageError(f"{directory} cannot be created: {error.strerror}") from None
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
        stack.enter_context(ballast(baseline, room_bytes))
        script = stack.enter_context(Script(directories[1], room_bytes, habits, waits=waits))
        fs_type = other.fs_type if other else "baseline"
        yield Sides(
            [
                _kvfs_side("kvfs", found.mountpoint, directories[0], room_bytes),
                ReplaySide(_name(fs_type, habits), directories[1], directories[1], None, script),
            ],
            room_bytes,
        )


def _kvfs_side(name: str, mountpoint: str, directory: str, room_bytes: int) -> ReplaySide:
    status: dict[str, Any] = mount_status(mountpoint)
    if int(status["usable_bytes"]) < room_bytes:
        raise BenchFailed(
            f"the pool has room for {format_size(int(status['usable_bytes']))}, not for "
            f"{format_size(room_bytes)}"
        )
    daemon = Daemon(int(status["server_pid"]))
    return ReplaySide(name, directory, str(status["source"]), daemon, None)


def _name(fs_type: str, habits: Habits) -> str:
    return f"{fs_type}, cleaned every {habits.look_s:g} s"


def _new(directory: str) -> str:
    os.mkdir(directory)
    return directory
