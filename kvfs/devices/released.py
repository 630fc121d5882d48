"""Whether the users of a SOURCE are gone: its file system, its mapping, or whoever looks at it.

It also says of which kind a SOURCE is.
"""

import contextlib
import os
import stat
import time
from collections.abc import Callable, Mapping
from typing import Final

from kvfs.core.encryption import Way
from kvfs.core.errors import SourceBusy, SourceDamaged, SourceMissing, UsageError
from kvfs.core.source_list import is_by_uuid, sources_of
from kvfs.devices import block, busy, directory, image
from kvfs.devices.device import SourceKind
from kvfs.devices.unlocked import mapping_of, told_as

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


def kind_to_be(source: str, *, may_create: bool) -> SourceKind:
    """Return the kind of *source*; a missing file may become an image.

    Raises SourceMissing, UsageError.
    """
    if not source:
        raise UsageError("SOURCE is empty; give a block device, an image file or a directory")
    if is_by_uuid(source):
        raise UsageError(f"{source} names a pool that is there; give the device or file itself")
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


def refuse_busy(source: str, kind: SourceKind) -> None:
    """Raise SourceBusy when *source*, of *kind*, has a user."""
    _REFUSE_BUSY[kind](source)


def wait_released(source: str, wait_s: float = 10.0, *, joins: bool = False) -> None:
    """Return when the last users of *source*, which may list several drives, are gone.

    Then fsck, mkfs or mount may follow.

    The device of a server is unmounted a moment after the server has ended: the kernel may still
    have to close the last fd, and udev opens loop devices that are detached. *joins*: a mount
    follows, so a file system that clients of a dead mount keep is joined, not waited for. Raises
    SourceBusy after *wait_s*.
    """
    deadline_s = time.monotonic() + wait_s
    for each in sources_of(source):
        _wait_released(each, deadline_s, joins=joins)


def _wait_released(source: str, deadline_s: float, *, joins: bool) -> None:
    kind, pause_s = recognise(source), _POLL_S
    while True:
        try:
            if _is_free(source, kind, joins=joins):
                return
        except SourceBusy:
            if time.monotonic() >= deadline_s:
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _POLL_MAX_S)


def _is_free(source: str, kind: SourceKind, *, joins: bool) -> bool:
    """Whether *source* has no user, or *joins* one that outlived its server. Raises SourceBusy."""
    mapping = mapping_of(source, kind)
    at, kind = (source, kind) if mapping is None else (mapping.path, "block")
    try:
        if joins and kind in _OUTLIVES and _OUTLIVES[kind](at):
            return True
        if mapping is not None and mapping.way is not Way.EPHEMERAL:
            raise SourceBusy(f"{source} is in use: by {mapping.name}, which is open over it")
        with contextlib.nullcontext() if mapping is None else told_as(source, mapping):
            refuse_busy(at, kind)
    except (OSError, SourceDamaged):
        if mapping is None:
            raise
        return False  # the mapping has just closed itself
    return True
