"""Store, look up and load one block with the system calls that connectors use, and time them.

A client of a mounted file system: it knows directories and files, and nothing of kvfs.
"""

import contextlib
import errno
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvfs.bench.kv_content import Bytes
from kvfs.bench.kv_shapes import Block, Layout
from kvfs.core.types import PAGE_BYTES, round_up


class Span(NamedTuple):
    """When a thread was inside system calls: two readings of time.perf_counter()."""

    begun_s: float
    ended_s: float


def aligned_buffer(size_bytes: int) -> Bytes:
    """Return a buffer of at least *size_bytes*, whole pages at a page boundary, for O_DIRECT."""
    return np.frombuffer(mmap.mmap(-1, round_up(max(1, size_bytes))), dtype=np.uint8)


def look_up(root: Path, block: Block) -> int | None:
    """Return the size in bytes of what lies under the block's name, or None: one stat(2)."""
    try:
        return os.stat(root / block.path).st_size
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)


def store(root: Path, block: Block, data: Bytes, *, direct: bool) -> Span:
    """Write *data* to a temporary file and rename it; return when.

    No fsync: no connector does. Raises OSError, and takes the temporary file away then.
    """
    final, draft = root / block.path, root / block.draft
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0)
    if block.shape.layout is Layout.VLLM:
        flags |= os.O_EXCL
    header_bytes = block.shape.header_bytes
    parts = (data[:header_bytes], data[header_bytes:]) if header_bytes else (data,)
    begun_s = time.perf_counter()
    final.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _opened(draft, flags) as fd:
            for part in parts:
                _write_all(fd, part.data)
        os.rename(draft, final)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
    return Span(begun_s, time.perf_counter())


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def load(root: Path, block: Block, room: Bytes, *, direct: bool) -> tuple[Bytes, Span]:
    """Read the whole block into *room*; return the part that was filled, and when.

    *room* is one page longer than the block at least, so that surplus bytes are seen. Raises
    OSError, FileNotFoundError among them: a miss.
    """
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    wanted_bytes = round_up(block.shape.size_bytes) + PAGE_BYTES
    view = room.data[:wanted_bytes]
    begun_s = time.perf_counter()
    filled_bytes = 0
    with _opened(root / block.path, flags) as fd:
        while filled_bytes < wanted_bytes:
            got_bytes = os.readv(fd, [view[filled_bytes:]])
            filled_bytes += got_bytes
            # An O_DIRECT read that ends between two pages has met the end of the file.
            if got_bytes == 0 or (direct and filled_bytes % PAGE_BYTES):
                break
    return room[:filled_bytes], Span(begun_s, time.perf_counter())


def direct_works(root: Path) -> bool:
    """Tell whether files here take O_DIRECT, by vLLM's probe: a page written to a file."""
    probe = root / f".o_direct_probe_{os.getpid()}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT
    try:
        with _opened(probe, flags) as fd:
            os.write(fd, aligned_buffer(PAGE_BYTES).data)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(probe)
    return True
