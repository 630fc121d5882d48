"""Store, look up and load one block with the system calls that connectors use; for demo and bench.

A client of a mounted file system: it knows names and bytes, but nothing about kvfs.
"""

import contextlib
import errno
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from kvfs.core.types import PAGE_BYTES

#: vLLM's fs tier adds O_EXCL.
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC

Name = str | bytes | Path


def look_up(name: Name) -> int | None:
    """Return the size in bytes of the file *name*, or None: one stat(2)."""
    try:
        return os.stat(name).st_size
    except FileNotFoundError:
        return None


def store(draft: Name, final: Name, parts: Iterable[memoryview], flags: int) -> None:
    """Write *parts* to the temporary name *draft* and rename it; *flags* are added to open(2).

    Without fsync, as connectors do. If it raises OSError, the temporary file is removed.
    """
    try:
        fd = os.open(draft, _CREATE | flags, 0o644)
        try:
            for part in parts:
                written_bytes = os.write(fd, part)
                while written_bytes < len(part):
                    written_bytes += os.write(fd, part[written_bytes:])
        finally:
            os.close(fd)
        os.rename(draft, final)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def load(name: Name, room: memoryview, flags: int) -> int:
    """Read the block into *room*, which may be larger; return how many bytes were read.

    *flags* are added to open(2). Raises OSError; FileNotFoundError is a miss.
    """
    fd = os.open(name, os.O_RDONLY | flags)
    try:
        filled_bytes = os.readv(fd, (room,))
        # An O_DIRECT read that ends inside a page has reached the end of the file.
        unit_bytes = PAGE_BYTES if flags & os.O_DIRECT else 1
        while 0 < filled_bytes < len(room) and filled_bytes % unit_bytes == 0:
            got_bytes = os.readv(fd, (room[filled_bytes:],))
            if got_bytes == 0:
                break
            filled_bytes += got_bytes
    finally:
        os.close(fd)
    return filled_bytes


def direct_works(root: Path) -> bool:
    """Tell whether files here take O_DIRECT, as vLLM probes it: by writing a page to a file."""
    probe = root / f".o_direct_probe_{os.getpid()}.tmp"
    try:
        with open(os.open(probe, _CREATE | os.O_DIRECT, 0o644), "wb", buffering=0) as file:
            file.write(mmap.mmap(-1, PAGE_BYTES))
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(probe)
    return True
