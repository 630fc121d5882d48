"""SOURCE as the operator gives it: which kind it is, and a function for each verb.

The three kinds are block.py, image.py and directory.py.
"""

import contextlib
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvfs.core.errors import SourceBlank, SourceBusy, SourceMissing, UsageError
from kvfs.core.setting_values import refuse_control_characters
from kvfs.core.sizes import format_size
from kvfs.core.types import CAPACITY_MIN_BYTES, FIRST_DRIVE
from kvfs.devices import block, busy, directory, image
from kvfs.devices.device import Device, DirectoryReserve, Fill, SourceKind
from kvfs.devices.pool_files import Membership, PoolHeader
from kvfs.devices.xfs import FailedButHeld, LeftMeanwhile

_RESERVE: Final = DirectoryReserve()
#: The kernel sends no event when a claim or lock ends, except to those that block on it.
_POLL_S: Final = 0.005
#: Each try that fails searches all processes for the user of the source, so tries become rarer.
_POLL_MAX_S: Final = 0.1
_REFUSE_BUSY: Final[Mapping[SourceKind, Callable[[str], None]]] = {
    "block": busy.refuse_busy,
    "image": image.refuse_busy_image,
    "directory": directory.refuse_busy_directory,
}
_OUTLIVES: Final[Mapping[SourceKind, Callable[[str], bool]]] = {
    "block": block.outlives,
    "image": image.outlives,
}
_OPENS: Final = {"block": block.open_block, "image": image.open_image}
#: How often the file system of a dead mount may end just before it is joined.
_JOINS_MAX: Final = 3


def recognise(source: str) -> SourceKind:
    """Return the kind of *source*; symlinks are followed. Raises SourceMissing."""
    try:
        mode = os.stat(source).st_mode
    except OSError as error:
        raise SourceMissing(f"{source}: {error.strerror}") from None
    if stat.S_ISBLK(mode):
        return "block"
    if stat.S_ISREG(mode):
        return "image"
    if stat.S_ISDIR(mode):
        return "directory"
    raise SourceMissing(f"{source} is neither a block device nor a file nor a directory")


def format_source(
    source: str,
    *,
    fill: Fill,
    size_bytes: int | None = None,
    capacity_bytes: int | None = None,
    force: bool = False,
    reserve: DirectoryReserve = _RESERVE,
) -> PoolHeader:
    """Make a pool of *source*; *fill* writes index and inode numbers into the new directory.

    A path that does not exist becomes an image file, of *size_bytes* or as large as
    *capacity_bytes* of blocks need. Nothing is written before all checks have passed; POOL is
    written last. The source is free again on return. Raises SourceMissing, SourceForeign (unless
    *force*), SourceBusy, SourceFull, SourceDamaged, UsageError, ToolMissing, NotRoot.
    """
    if capacity_bytes is not None and capacity_bytes < CAPACITY_MIN_BYTES:
        raise UsageError(
            f"{source}: a capacity of {format_size(capacity_bytes)} is too small; a pool needs "
            f"{format_size(CAPACITY_MIN_BYTES)}"
        )
    kind = _kind_to_be(source, may_create=not (size_bytes is None and capacity_bytes is None))
    try:
        refuse_control_characters(os.path.abspath(source))  # kvfs mount would refuse it
    except ValueError as error:
        raise UsageError(f"SOURCE: {error}") from None
    if size_bytes is not None and kind != "image":
        raise UsageError(f"{source} is a {kind}; only an image file can be given a size")
    if kind == "block":
        header = block.format_block(source, capacity_bytes=capacity_bytes, force=force, fill=fill)
    elif kind == "image":
        header = image.format_image(
            source, size_bytes=size_bytes, capacity_bytes=capacity_bytes, force=force, fill=fill
        )
    else:
        header = directory.format_directory(
            source, capacity_bytes=capacity_bytes, force=force, fill=fill, reserve=reserve
        )
    wait_released(source)
    return header


def open_source(
    source: str,
    *,
    read_only: bool = False,
    capacity_bytes: int | None = None,
    reserve: DirectoryReserve = _RESERVE,
) -> Device:
    """Open the pool on *source* and hold it until the device's ``close``.

    *capacity_bytes* overrides what the pool was made with. Raises SourceBlank (kvfs mount then
    formats it, or creates the image), SourceMissing, SourceForeign, FormatUnknown, SourceBusy,
    SourceDamaged, UsageError, ToolMissing, NotRoot; in that case the source is unchanged.
    """
    device = _open(source, read_only=read_only, capacity_bytes=capacity_bytes, reserve=reserve)
    if device.several is not None:
        device.close()
        raise UsageError(_missing(source, device.several, 1))
    return device


def open_drives(
    sources: Sequence[str], *, read_only: bool = False, reserve: DirectoryReserve = _RESERVE
) -> Device:
    """Open the pool on *sources*, which are all its drives in any order; return the first.

    The others close with it. Raises UsageError if they are not all of one pool, and what
    open_source raises.
    """
    with contextlib.ExitStack() as stack:
        found: dict[int, Device] = {}
        for source in sources:
            opened = _open(source, read_only=read_only, capacity_bytes=None, reserve=reserve)
            device = stack.enter_context(opened)
            drive = FIRST_DRIVE if device.several is None else device.several.drive
            if found.setdefault(drive, device) is not device:
                raise UsageError(f"{source}: {found[drive].source} is drive {drive} already")
        first, *others = (found[drive] for drive in sorted(found))
        for device in found.values():
            if (one := device.several) is None or first.several is None:
                if others:
                    raise UsageError(f"{device.source} is a pool of one drive")
            elif (one.pool, one.drives) != (first.several.pool, first.several.drives):
                raise UsageError(f"{device.source} is of another pool than {first.source}")
            elif len(found) < len(one.drives):
                raise UsageError(_missing(first.source, one, len(found)))
        first.take_in(others)
        stack.pop_all()
        return first


def _missing(source: str, several: Membership, given: int) -> str:
    whole = len(several.drives)
    return f"{source} is drive {several.drive} of a pool of {whole} drives; {given} is not all"


def _open(
    source: str, *, read_only: bool, capacity_bytes: int | None, reserve: DirectoryReserve
) -> Device:
    """Open one drive; raises what open_source raises."""
    kind = _kind_to_be(source, may_create=capacity_bytes is not None)
    if not os.path.exists(source):
        raise SourceBlank(f"{source} does not exist yet; kvfs mkfs makes an image file of it")
    if kind in _OPENS:
        for _ in range(_JOINS_MAX):
            try:
                return _OPENS[kind](source, read_only=read_only, capacity_bytes=capacity_bytes)
            except LeftMeanwhile:
                wait_released(source, joins=True)
            except FailedButHeld as failed:
                try:
                    wait_released(source)
                except SourceBusy:
                    raise failed from None
        raise SourceBusy(f"{source} was in use until just now; try again")
    return directory.open_directory(
        source, read_only=read_only, capacity_bytes=capacity_bytes, reserve=reserve
    )


def destroy_source(source: str) -> None:
    """Make *source*, a pool that is not in use, blank again. Raises what open_source raises.

    In a directory only the pool's files are removed; of a block device or image the first and last
    4 MiB are zeroed. The source is free again on return.
    """
    kind = recognise(source)
    if kind == "block":
        block.destroy_block(source)
    elif kind == "image":
        image.destroy_image(source)
    else:
        directory.destroy_directory(source)
    wait_released(source)


def wait_released(source: str, wait_s: float = 10.0, *, joins: bool = False) -> None:
    """Return when the last user of *source* is gone, so that fsck, mkfs or mount may follow.

    The device of a server is unmounted a moment after the server has ended: the kernel may still
    have to close the last fd, and udev opens loop devices that are detached. *joins*: a mount
    follows, so a file system that clients of a dead mount keep is joined, not waited for. Raises
    SourceBusy after *wait_s*.
    """
    kind = recognise(source)
    refuse_busy = _REFUSE_BUSY[kind]
    deadline_s, pause_s = time.monotonic() + wait_s, _POLL_S
    while True:
        if joins and kind in _OUTLIVES and _OUTLIVES[kind](source):
            return
        try:
            refuse_busy(source)
            return
        except SourceBusy:
            if time.monotonic() >= deadline_s:
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _POLL_MAX_S)


def _kind_to_be(source: str, *, may_create: bool) -> SourceKind:
    """Return the kind of *source*; a missing file may become an image. Raises SourceMissing."""
    if not source:
        raise UsageError("SOURCE is empty; give a block device, an image file or a directory")
    if os.path.lexists(source) or not may_create:
        return recognise(source)
    if source.endswith("/"):
        raise UsageError(f"{source} does not exist; make it, or name an image file without a slash")
    parent = os.path.dirname(os.path.abspath(source))
    if not os.path.isdir(parent):
        raise SourceMissing(f"{source}: the directory {parent} does not exist")
    # A mistyped device name must not fill devtmpfs; /dev/shm is another file system.
    if parent.startswith("/dev") and os.stat(parent).st_dev == os.stat("/dev").st_dev:
        raise SourceMissing(f"{source}: no such device")
    return "image"
