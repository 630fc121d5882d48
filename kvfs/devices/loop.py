"""An image file as a block device: a loop device that goes away with its last user.

Layouts and numbers: linux/loop.h. LOOP_CONFIGURE (Linux 5.8) sets file, flags and block size in one
step, so nobody sees a half configured device.
"""

import contextlib
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from kvfs.core.errors import SourceBusy, SourceDamaged, ToolMissing

_CONTROL: Final = "/dev/loop-control"
_LOOP_CTL_GET_FREE: Final = 0x4C82
_LOOP_CONFIGURE: Final = 0x4C0A
_LOOP_GET_STATUS64: Final = 0x4C05
_FLAG_READ_ONLY: Final = 1
_FLAG_AUTOCLEAR: Final = 4
_FLAG_DIRECT_IO: Final = 16
#: struct loop_info64: device, inode, rdevice, offset, sizelimit; number, encrypt_type,
#: encrypt_key_size, flags; file_name, crypt_name, encrypt_key; init[2].
_INFO: Final = struct.Struct("=5Q4I64s64s32s2Q")
assert _INFO.size == 232
#: struct loop_config: fd, block_size, info, reserved[8].
_CONFIG_HEAD: Final = struct.Struct("=II")
_CONFIG_TAIL_BYTES: Final = 64
#: Direct I/O needs blocks at least as large as those of the drive below; these fit every drive.
_BLOCK_MAX_BYTES: Final = 4096
#: Others may take the free device between the two ioctls, but not this many times in a row.
_ATTEMPTS_MAX: Final = 64


class Attached(NamedTuple):
    """A loop device: its path, an fd that holds it, and whether it bypasses the page cache."""

    path: str
    fd: int
    direct_io: bool


def attach(image_fd: int, image: str, *, read_only: bool = False) -> Attached:
    """Attach the file behind *image_fd* to a free loop device, which clears itself after use.

    *image* is its path, for messages. The loop device shares the open file: a flock on it lasts as
    long as the device. Raises ToolMissing, SourceBusy when no device is free, SourceDamaged.
    """
    try:
        control_fd = os.open(_CONTROL, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ToolMissing(f"{image}: no loop devices here: {_CONTROL}: {error.strerror}") from None
    try:
        for _ in range(_ATTEMPTS_MAX):
            path = f"/dev/loop{fcntl.ioctl(control_fd, _LOOP_CTL_GET_FREE)}"
            fd = os.open(path, (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC)
            try:
                return Attached(path, fd, _configure(fd, image_fd, image, read_only=read_only))
            except BaseException as error:
                os.close(fd)
                if not isinstance(error, OSError) or error.errno != errno.EBUSY:
                    raise
    except OSError as error:
        raise SourceDamaged(f"{image}: no loop device for it: {error}") from error
    finally:
        os.close(control_fd)
    raise SourceBusy(f"{image}: every loop device is taken by others as soon as it is free")


def users_of(image_fd: int) -> Iterator[str]:
    """Yield the paths of the loop devices that are attached to the file behind *image_fd*."""
    wanted = os.fstat(image_fd)
    for path, info in _attached_ones():
        if info[:2] == (_kernel_device_no(wanted), wanted.st_ino):
            yield path


def others_of(path: str) -> Iterator[str]:
    """Yield the paths of other loop devices that share bytes of a file with loop device *path*.

    A file may have several loop devices, and the kernel's exclusive claim covers only one.
    """
    number = os.stat(path).st_rdev
    infos = dict(_attached_ones())
    own = next((info for other, info in infos.items() if os.stat(other).st_rdev == number), None)
    for other, info in infos.items():
        if own is not None and info is not own and info[:2] == own[:2] and _overlap(info, own):
            yield other


def _attached_ones() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield path and status of each loop device that is attached to a file."""
    for name in sorted(os.listdir("/sys/block")):
        if not os.path.exists(f"/sys/block/{name}/loop"):
            continue
        try:
            fd = os.open(f"/dev/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            info = _status(fd)
        except OSError:  # ENXIO: cleared meanwhile
            continue
        finally:
            os.close(fd)
        yield f"/dev/{name}", info


def _overlap(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether two loop devices of one file share bytes; a size limit of 0 means no limit."""
    (start, limit), (other_start, other_limit) = one[3:5], other[3:5]
    ends_before = other_limit and other_start + other_limit <= start
    return not ends_before and not (limit and start + limit <= other_start)


def is_loop(path: str) -> bool:
    """Whether *path* is a loop device, where a discard would punch holes into a file."""
    number = os.stat(path)
    return stat.S_ISBLK(number.st_mode) and os.major(number.st_rdev) == 7


def _configure(fd: int, image_fd: int, image: str, *, read_only: bool) -> bool:
    flags = _FLAG_AUTOCLEAR | _FLAG_DIRECT_IO | (_FLAG_READ_ONLY if read_only else 0)
    try:
        fcntl.ioctl(fd, _LOOP_CONFIGURE, _config(image_fd, image, flags))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Some kernels refuse direct I/O if it is not possible; others silently do without.
        fcntl.ioctl(fd, _LOOP_CONFIGURE, _config(image_fd, image, flags & ~_FLAG_DIRECT_IO))
    return bool(_status(fd)[8] & _FLAG_DIRECT_IO)


def _config(image_fd: int, image: str, flags: int) -> bytes:
    name = os.fsencode(os.path.abspath(image))[:63]
    info = _INFO.pack(0, 0, 0, 0, 0, 0, 0, 0, flags, name, b"", b"", 0, 0)
    return _CONFIG_HEAD.pack(image_fd, _block_bytes(image_fd)) + info + bytes(_CONFIG_TAIL_BYTES)


def _block_bytes(image_fd: int) -> int:
    """Return the block size of the drive below the image; the largest if it is unknown.

    Clients may use O_DIRECT in multiples of it. Unknown: a file system on several drives.
    """
    device = os.fstat(image_fd).st_dev
    place = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
    for queue in (f"{place}/queue", f"{place}/../queue"):  # of a drive, or of a partition
        with contextlib.suppress(OSError, ValueError), open(f"{queue}/logical_block_size") as file:
            return min(int(file.read()), _BLOCK_MAX_BYTES)
    return _BLOCK_MAX_BYTES


def _status(fd: int) -> tuple[int, ...]:
    raw = bytearray(_INFO.size)
    fcntl.ioctl(fd, _LOOP_GET_STATUS64, raw, True)
    return _INFO.unpack(raw)


def _kernel_device_no(status: os.stat_result) -> int:
    """Return *status*'s device as in lo_device: huge_encode_dev() (linux/kdev_t.h), like st_dev."""
    return status.st_dev
