"""Failed requests to the device, as the kernel logs them at once in /dev/kmsg.

This process gets no errno for a read error of a passthrough reader, or for a page that could not be
written back. So it looks for the lines of blk_print_req_error() in block/blk-mq.c and of iomap's
write-back. The kernel prints at most ten of a kind in five seconds. A server that may not read the
kernel's log learns nothing here and must check by other means.
"""

import contextlib
import os
import re
from typing import Final, NamedTuple

_LOG: Final = "/dev/kmsg"
_DEVICE: Final = "/sys/dev/block/{major}:{minor}"
#: The longest record, with its dictionary (Documentation/ABI/testing/dev-kmsg).
_RECORD_MAX_BYTES: Final = 8192
#: Records read at a time; the rest is read the next time.
_RECORDS_MAX: Final = 1000
_DEPTH_MAX: Final = 8
#: What failed, by blk_op_str() in block/blk-core.c.
_OPERATION: Final = re.compile(rb" op 0x[0-9a-f]+:\(([A-Z_]+)\)")
_WRITES: Final = frozenset({b"WRITE", b"FLUSH", b"ZONE_APPEND"})


class DeviceErrors(NamedTuple):
    """Whether reads or writes of the device failed since the last call."""

    reads: bool = False
    writes: bool = False


class KernelLog:
    """The kernel's log from now on, for one device."""

    def __init__(self, directory_fd: int) -> None:
        """Follow the device of *directory_fd*'s file system, if the log may be read."""
        self._fd = -1
        names = device_names(os.fstat(directory_fd).st_dev)
        if not names:
            return
        alternatives = b"|".join(re.escape(os.fsencode(name)) for name in sorted(names))
        self._ours = re.compile(rb"(?:dev |\(|;)(?:" + alternatives + rb")[,):]")
        with contextlib.suppress(OSError):
            self._fd = os.open(_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)

    def errors(self) -> DeviceErrors:
        """Return what failed since the last call; takes 1 us if nothing was logged."""
        if self._fd < 0:
            return DeviceErrors()
        found = DeviceErrors()
        for _ in range(_RECORDS_MAX):
            try:
                record = os.read(self._fd, _RECORD_MAX_BYTES)
            except BrokenPipeError:
                continue  # some were overwritten before they were read
            except OSError:
                break  # EAGAIN: no more
            line = record.partition(b"\n")[0]
            if self._ours.search(line):
                more = errors_in(line)
                found = DeviceErrors(found.reads or more.reads, found.writes or more.writes)
        return found

    def close(self) -> None:
        """Stop following."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def errors_in(line: bytes) -> DeviceErrors:
    """Return what *line* of the kernel's log says about the device."""
    if b"error" not in line.lower():
        return DeviceErrors()
    operation = _OPERATION.search(line)
    if operation is not None:  # failed discards and zeroing lose nothing
        return DeviceErrors(operation[1] == b"READ", operation[1] in _WRITES)
    # A line without an operation is the file system's, about a file's bytes or its own metadata.
    return DeviceErrors(reads=b"writeback" not in line, writes=True)


def device_names(number: int) -> set[str]:
    """Return the kernel's names of block device *number* and of all that it lies on.

    Empty for a file system without one.
    """
    path = os.path.realpath(_DEVICE.format(major=os.major(number), minor=os.minor(number)))
    return _names_below(path, _DEPTH_MAX) if os.path.isdir(path) else set()


def _names_below(path: str, depth: int) -> set[str]:
    names = {os.path.basename(path)}
    if depth and os.path.exists(f"{path}/partition"):
        names |= _names_below(os.path.dirname(path), depth - 1)
    with contextlib.suppress(OSError):
        for slave in os.listdir(f"{path}/slaves") if depth else ():
            names |= _names_below(os.path.realpath(f"{path}/slaves/{slave}"), depth - 1)
    return names
