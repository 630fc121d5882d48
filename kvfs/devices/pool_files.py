"""The files of a pool directory that say what it is, and who has it: its header POOL, and its lock.

Everything is reached through ``pool_fd``, since a detached mount has no path.
"""

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvfs import __version__
from kvfs.core.drives import DRIVES_MAX
from kvfs.core.errors import (
    NO_SPACE,
    FormatUnknown,
    NoSpace,
    SourceBusy,
    SourceDamaged,
    SourceForeign,
    SourceFull,
)
from kvfs.core.pool_layout import (
    COPIES,
    DATA_NAME,
    FAN_OUTS,
    FILES,
    INDEXES,
    LOCK,
    LOCK_NAME,
    LOG,
    POOL,
    POOL_NEW,
    QUARANTINE,
    STRAYS,
    fan_out_directories,
)
from kvfs.core.types import FIRST_DRIVE, SIZE_MAX_BYTES, DriveNo
from kvfs.devices.busy import lock_holders
from kvfs.machine.mount_table import where_in_use

FORMAT_VERSION: Final = 1
#: That of a pool of several drives: a kvfs that knows only the other would take one for all.
_SEVERAL_VERSION: Final = 2
#: 256 UUIDs in JSON are 10 KiB.
_HEADER_MAX_BYTES: Final = 16 << 10
_EPOCH_MAX: Final = (1 << 64) - 1
#: What open(2) returns for a directory, a symlink and a socket instead of a file.
_NO_FILE: Final = (errno.EISDIR, errno.ELOOP, errno.ENXIO)


class Membership(NamedTuple):
    """Which drive of a pool of several one is: *drive* of ``drives``, their UUIDs by number.

    No new blocks are put on it if it is ``draining``. There is no drive any more with the numbers
    ``removed``.
    """

    pool: str
    drive: int
    drives: tuple[str, ...]
    draining: bool = False
    removed: tuple[int, ...] = ()


class PoolHeader(NamedTuple):
    """The content of POOL. ``capacity_bytes`` is None if blocks may use all of the device.

    ``uuid`` is that of the drive's own file system. ``several`` is None in a pool of one drive.
    """

    epoch: int
    uuid: str
    created_ns: int
    kvfs: str
    capacity_bytes: int | None
    several: Membership | None = None

    @property
    def drive(self) -> DriveNo:
        """Which drive of its pool it is."""
        return FIRST_DRIVE if self.several is None else DriveNo(self.several.drive)

    @property
    def membership(self) -> Membership:
        """Which drive of its pool it is, also if it is the only one."""
        return self.several or Membership(self.uuid, FIRST_DRIVE, (self.uuid,))

    @property
    def is_draining(self) -> bool:
        """Whether no new blocks are put on it."""
        return self.several is not None and self.several.draining

    @property
    def is_removed(self) -> bool:
        """Whether it is no drive of its pool any more."""
        return self.several is not None and self.several.drive in self.several.removed


def new_header(capacity_bytes: int | None) -> PoolHeader:
    """Return the header of a new pool. Its epoch is random, the generation of all its inodes."""
    epoch = int.from_bytes(os.urandom(8), "little")
    return PoolHeader(epoch, str(uuid.uuid4()), time.time_ns(), __version__, capacity_bytes)


def new_headers(capacities_bytes: Sequence[int | None]) -> list[PoolHeader]:
    """Return the headers of the drives of a new pool, by number."""
    first = new_header(capacities_bytes[FIRST_DRIVE])
    uuids = (first.uuid, *(str(uuid.uuid4()) for _ in capacities_bytes[1:]))
    if len(uuids) == 1:
        return [first]
    return [
        first._replace(uuid=own, capacity_bytes=most, several=Membership(first.uuid, drive, uuids))
        for drive, (own, most) in enumerate(zip(uuids, capacities_bytes, strict=True))
    ]


def one_more_header(header: PoolHeader) -> PoolHeader:
    """Return that of a drive which joins the pool of the drive with *header*, whole."""
    own, before = str(uuid.uuid4()), header.membership
    drives = (*before.drives, own)
    joined = Membership(before.pool, len(before.drives), drives, removed=before.removed)
    return header._replace(uuid=own, kvfs=__version__, capacity_bytes=None, several=joined)


def parse_header(raw: bytes, source: str) -> PoolHeader:
    """Return the header in *raw*. Raises SourceForeign, or FormatUnknown for another version."""
    try:
        fields = json.loads(raw)
        version = fields["format"]
        if version not in (FORMAT_VERSION, _SEVERAL_VERSION):
            raise FormatUnknown(
                f"{source} is a pool of format {version!r:.20}; "
                f"kvfs {__version__} knows format {FORMAT_VERSION} and {_SEVERAL_VERSION}"
            )
        capacity = fields["capacity_bytes"]
        return PoolHeader(
            epoch=_number(fields["epoch"], _EPOCH_MAX),
            uuid=str(fields["uuid"]),
            created_ns=_number(fields["created_ns"], _EPOCH_MAX),
            kvfs=str(fields["kvfs"]),
            capacity_bytes=None if capacity is None else _number(capacity, SIZE_MAX_BYTES, 1),
            several=_membership(fields) if version == _SEVERAL_VERSION else None,
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise SourceForeign(f"{source}: its file POOL is not a pool's header") from None


def _membership(fields: Mapping[str, Any]) -> Membership:
    """Return which drive of its pool the one with these *fields* is.

    Raises ValueError, KeyError, TypeError, OverflowError.
    """
    drives = tuple(map(str, fields["drives"]))
    drive = _number(fields["drive"], len(drives) - 1)
    if not 1 < len(drives) <= DRIVES_MAX or drives[drive] != fields["uuid"]:
        raise ValueError(f"drive {drive} of {len(drives)}")
    removed = tuple(_number(each, len(drives) - 1) for each in fields.get("removed", ()))
    drains = fields.get("draining") is True
    return Membership(str(fields["pool"]), drive, drives, drains, removed)


def _number(said: Any, most: int, least: int = 0) -> int:  # noqa: ANN401
    """Return the whole number *said*. Raises ValueError, TypeError, OverflowError (infinity)."""
    number = int(said)
    if not least <= number <= most:
        raise ValueError(f"{number} is not in {least} to {most}")
    return number


def refuse_no_files(pool_fd: int, source: str) -> None:
    """Raise SourceForeign if something that is not a file has the name of a pool's file.

    Opening a fifo would wait for a writer, a symlink may lead to somebody else's file, and the
    content of a directory is not the pool's. A name that stat refuses fails later, when it is read.
    """
    for name in (POOL, *FILES):
        try:
            mode = os.stat(name, dir_fd=pool_fd, follow_symlinks=False).st_mode
        except OSError:
            continue
        if not stat.S_ISREG(mode):
            raise SourceForeign(f"{source}: its {name} is not a file; remove it, and try again")
    refuse_led_astray(pool_fd, source)


def refuse_led_astray(pool_fd: int, source: str) -> None:
    """Raise SourceForeign if a directory of the pool is a symlink, or belongs to another user.

    Otherwise the server would create, empty and remove files there with its own rights. Something
    that is not a directory at all fails where it is used.
    """
    for name in (*INDEXES, LOG, QUARANTINE, STRAYS, *FAN_OUTS):
        if not _is_own_directory(name, pool_fd, source):
            continue
        for path in _parts_of(name):
            _is_own_directory(path, pool_fd, source)


def _parts_of(name: str) -> Iterable[str]:
    """Return what is always at the same path in directory *name* of a pool."""
    if name in FAN_OUTS:
        return fan_out_directories(name)
    if name in INDEXES:
        return (f"{name}/{file}" for file in (DATA_NAME, LOCK_NAME))
    return (f"{name}/{file}" for file in COPIES) if name == LOG else ()


def _is_own_directory(path: str, pool_fd: int, source: str) -> bool:
    """Whether *path*, whose parents were checked before, is a directory. Raises SourceForeign."""
    try:
        status = os.stat(path, dir_fd=pool_fd, follow_symlinks=False)
    except OSError:
        return False
    if stat.S_ISLNK(status.st_mode):
        raise SourceForeign(f"{source}: its {path} is a symlink; remove it, and try again")
    if status.st_uid not in (0, os.geteuid()):
        raise SourceForeign(
            f"{source}: its {path} belongs to user {status.st_uid}, who could lead kvfs to other "
            f"files",
            f"chown -R {os.geteuid()} {source}, if you trust what is in it",
        )
    return stat.S_ISDIR(status.st_mode)


def read_header(pool_fd: int, source: str) -> PoolHeader | None:
    """Return the header of the pool in *pool_fd*, None without POOL.

    Raises what parse_header and refuse_no_files raise.
    """
    refuse_no_files(pool_fd, source)
    try:
        fd = os.open(POOL, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=pool_fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SourceForeign(f"{source}: its file POOL cannot be read: {error.strerror}") from None
    try:
        return parse_header(os.read(fd, _HEADER_MAX_BYTES), source)
    finally:
        os.close(fd)


def write_header(pool_fd: int, header: PoolHeader) -> None:
    """Write POOL, whole or not at all, and make it durable. Raises OSError.

    mkfs does this last. The fsync commits the journal of XFS and ext4, and with it all directories
    that were made before.
    """
    fields = header._asdict()
    del fields["several"]
    if header.several is None:
        text = json.dumps({"format": FORMAT_VERSION, **fields})
    else:
        said = header.several._asdict().items()
        several = {name: value for name, value in said if value or name == "drive"}
        text = json.dumps({"format": _SEVERAL_VERSION, **fields, **several})
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(POOL_NEW, flags, 0o600, dir_fd=pool_fd)
    try:
        os.write(fd, text.encode())
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(POOL_NEW, POOL, src_dir_fd=pool_fd, dst_dir_fd=pool_fd)
    os.fsync(pool_fd)


def lock_pool(pool_fd: int, source: str, *, create: bool = False) -> int:
    """Return an fd that holds the pool's lock until its last close.

    LOCK is opened for reading only, since a read-only mount locks, too. Raises SourceBusy,
    SourceForeign (no file LOCK), SourceFull, SourceDamaged.
    """
    fd = _open_lock(pool_fd, source, create=create)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        where = where_in_use(source) or "already"
        raise SourceBusy(f"{source} is in use: the pool is mounted {where}") from None
    if os.fstat(fd).st_nlink == 0:  # a format or destroy removed it meanwhile
        os.close(fd)
        raise SourceBusy(f"{source}: the pool was removed just now")
    return fd


def is_locked(pool_fd: int) -> bool:
    """Whether a process in this pid namespace holds the pool's lock. Does not try to lock."""
    try:
        return bool(lock_holders(os.stat(LOCK, dir_fd=pool_fd, follow_symlinks=False)))
    except OSError:
        return False


def _open_lock(pool_fd: int, source: str, *, create: bool) -> int:
    # O_NONBLOCK: if it is a fifo, do not wait for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
    with write_errors(source):
        try:
            fd = os.open(LOCK, flags | (os.O_CREAT if create else 0), 0o600, dir_fd=pool_fd)
        except FileNotFoundError:
            raise SourceForeign(f"{source} is an incomplete pool: no file {LOCK}") from None
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            fd = -1
    if fd >= 0 and stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    if fd >= 0:
        os.close(fd)
    raise SourceForeign(f"{source}: its {LOCK} is not a file; remove it, and a mount makes it")


@contextlib.contextmanager
def write_errors(source: str) -> Iterator[None]:
    """Turn what writing a new pool raises into SourceFull or SourceDamaged."""
    try:
        yield
    except NoSpace as error:
        raise SourceFull(f"{source}: no room for the pool: {error}") from error
    except OSError as error:
        if error.errno in NO_SPACE:
            raise SourceFull(f"{source}: no room for the pool: {error.strerror}") from error
        what = f"{error.filename}: " if isinstance(error.filename, str) else ""
        raise SourceDamaged(
            f"{source}: the pool cannot be written: {what}{error.strerror}"
        ) from error
