"""Finds out what a block device or image holds: nothing, a pool, or other data."""

import os
from typing import Final, NamedTuple

from kvfs.core.encryption import Way
from kvfs.core.errors import SourceDamaged, SourceForeign
from kvfs.devices.mapped import lock_on
from kvfs.devices.xfs_tools import last_line, run_tool

#: The XFS label of a pool: blkid and lsblk show it, and kvfs mounts no XFS without it.
POOL_LABEL: Final = "kvfs"
#: blkid finds signatures in the first and last MiB. Anything else but zeros counts as data, too.
_EDGE_BYTES: Final = 4 << 20
_BLKID_TIMEOUT_S: Final = 60.0
#: blkid(8): nothing found; several conflicting signatures found.
_BLKID_NOTHING: Final = 2
_BLKID_AMBIVALENT: Final = 8


class Content(NamedTuple):
    """What was found: ``text`` describes it, ``uuid`` is the file system's."""

    text: str
    is_pool: bool = False
    uuid: str = ""


def find_content(path: str) -> Content | None:
    """Return what the device or file at *path* holds, None if it is blank.

    Blank: blkid finds no signature, and the first and last 4 MiB are zero. So is what was encrypted
    with an ephemeral key, unless its mapping is open (mapped.py). Raises SourceDamaged if it cannot
    be read, ToolMissing.
    """
    if (lock := lock_on(path)) is not None and lock.way is Way.EPHEMERAL:
        return None
    result = run_tool("blkid", "-p", "-o", "export", path, timeout_s=_BLKID_TIMEOUT_S)
    if result.returncode == _BLKID_AMBIVALENT:
        return Content("several conflicting signatures (see wipefs)")
    if result.returncode not in (0, _BLKID_NOTHING):
        raise SourceDamaged(f"{path}: blkid fails: {last_line(result.stderr)}")
    found = read_blkid(result.stdout)
    if found is None and not edges_are_zero(path):
        return Content("data that blkid does not recognise")
    return found


def tagged(tag: str) -> list[str]:
    """Return the paths of all block devices here with *tag*, such as ``UUID=...``, by blkid(8).

    Asks each device anew, and no cache. Raises ToolMissing, SourceDamaged.
    """
    asked = ("-c", os.devnull, "-o", "device", "-t", tag)
    return run_tool("blkid", *asked, timeout_s=_BLKID_TIMEOUT_S).stdout.split("\n")[:-1]


def read_blkid(output: str) -> Content | None:
    """Return the content that the output of ``blkid -p -o export`` names, or None.

    The output for a blank partition is not empty: PART_ENTRY_* describe its place in the table.
    """
    pairs = (line.split("=", 1) for line in output.splitlines() if "=" in line)
    fields = {key: value.replace("\\", "") for key, value in pairs}
    kind, label, uuid = (fields.get(key, "") for key in ("TYPE", "LABEL", "UUID"))
    if kind == "xfs" and label == POOL_LABEL:
        return Content(f"kvfs pool, UUID {uuid}", is_pool=True, uuid=uuid)
    if kind:
        what = "file system" if fields.get("USAGE") == "filesystem" else "signature"
        return Content(f"{kind} {what}, " + (f"label {label}" if label else "no label"), uuid=uuid)
    if "PTTYPE" in fields:
        return Content(f"{fields['PTTYPE']} partition table")
    return None


def edges_are_zero(path: str) -> bool:
    """Whether the first and the last 4 MiB of *path* are zero. Raises SourceDamaged."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size_bytes = os.lseek(fd, 0, os.SEEK_END)
            last_bytes = max(0, size_bytes - _EDGE_BYTES)
            return _is_zero(fd, 0) and _is_zero(fd, last_bytes)
        finally:
            os.close(fd)
    except OSError as error:
        raise SourceDamaged(f"{path}: {error.strerror}") from error


def zero_edges(fd: int) -> None:
    """Overwrite the first and last 4 MiB behind *fd* with zeros and sync. Raises OSError."""
    size_bytes = os.lseek(fd, 0, os.SEEK_END)
    for offset_bytes in (0, max(0, size_bytes - _EDGE_BYTES)):
        zeros = memoryview(bytes(min(_EDGE_BYTES, size_bytes - offset_bytes)))
        while zeros:
            written_bytes = os.pwrite(fd, zeros, offset_bytes)
            zeros, offset_bytes = zeros[written_bytes:], offset_bytes + written_bytes
    os.fsync(fd)


def refuse_content(path: str, content: Content | None, *, force: bool) -> None:
    """Raise SourceForeign, naming *content* and the flag --force, if not blank and not *force*."""
    if content is not None and not force:
        raise SourceForeign(f"{path} is not blank: {content.text}; --force overwrites it")


def size_bytes_of(path: str) -> int:
    """Return the size of a block device or file in bytes. Raises SourceDamaged."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SourceDamaged(f"{path}: {error.strerror}") from error
    try:
        return os.lseek(fd, 0, os.SEEK_END)
    finally:
        os.close(fd)


def _is_zero(fd: int, offset_bytes: int) -> bool:
    data = os.pread(fd, _EDGE_BYTES, offset_bytes)
    return not data.strip(b"\0")
