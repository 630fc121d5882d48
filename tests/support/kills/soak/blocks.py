"""The bytes of a soak's blocks, how clients read and write them, and what a load must have found.

A block's header tells its version and size; the rest follows from the version, which no two stores
share.
"""

import contextlib
import mmap
import os
import struct
from collections.abc import Iterator
from typing import Final

import numpy as np

from kvfs.bench.kv_shapes import Bytes, KvContent, first_difference
from tests.support.kills.soak.table import ABSENT, Found, Row

#: Version, size.
HEADER: Final = struct.Struct("<QQ")
ALIGNED: Final = 4096
_PART_BYTES: Final = 1 << 18
_SEED: Final = 7
#: Odd, so that no two versions turn the words of the content alike.
_SPREAD: Final = 0x9E3779B97F4A7C15


class Blocks:
    """Makes and judges blocks of at most *most_bytes*."""

    def __init__(self, most_bytes: int) -> None:
        self._content = KvContent(_SEED, most_bytes)
        self.most_bytes = most_bytes
        self._memory = mmap.mmap(-1, most_bytes + ALIGNED)  # aligned, as direct I/O wants it
        self._room = np.frombuffer(self._memory, np.uint8)
        self._expected = np.zeros(most_bytes + 8, np.uint8)

    def _fill(self, into: Bytes, version: int, size_bytes: int) -> Bytes:
        block = self._content.fill(version * _SPREAD % (1 << 64), into, size_bytes)
        HEADER.pack_into(block.data, 0, version, size_bytes)
        return block

    def made(self, version: int, size_bytes: int) -> memoryview:
        """Return the bytes of a block, in memory that the next call uses again."""
        return self._fill(self._room, version, size_bytes).data

    def complaint(self, data: bytes, expected: Found) -> str | None:
        """Return what is wrong with *data*, if it is to be *expected*."""
        found = np.frombuffer(data, np.uint8)
        self._expected[:] = 0
        if expected.version != ABSENT:
            self._fill(self._expected, expected.version, self.most_bytes)
            whole_bytes = whole_size(data) or expected.size_bytes
            HEADER.pack_into(self._expected.data, 0, expected.version, whole_bytes)
            self._expected[expected.filled_bytes :] = 0
        at = first_difference(self._expected[: expected.size_bytes], found)
        if at is None:
            return None
        end = data[at : at + 16].hex()
        zeros = len(data) - at - len(data[at:].lstrip(b"\0"))
        return (
            f"{len(data)} bytes differ at {at} from {expected}: {end}, {zeros} zeros from there;"
            f" header {header_of(data)}"
        )

    def judged(self, data: bytes, before: Row, after: Row) -> str | None:
        """Return what is wrong with *data* of a load between *before* and *after*."""
        header = header_of(data)
        version = header[0] if header else ABSENT
        if version not in before.versions_until(after) - {ABSENT}:
            return f"{len(data)} bytes, header {header}, is none of {before.versions_until(after)}"
        if version == before.left.version:
            return self.complaint(data, before.left)
        assert header is not None
        size_bytes = min(header[1], self.most_bytes)
        return self.complaint(data, Found(version, size_bytes, size_bytes))


def header_of(data: bytes) -> tuple[int, int] | None:
    """Return version and size as *data* tells them."""
    if len(data) < HEADER.size:
        return None
    version, size_bytes = HEADER.unpack_from(data)
    return version, size_bytes


def whole_size(data: bytes) -> int:
    """Return the size that the block had when it was written; 0 when *data* does not tell."""
    header = header_of(data)
    return header[1] if header else 0


def write_all(fd: int, data: memoryview, at: int = 0) -> None:
    """Write *data* in parts, from *at* on."""
    while data:
        done = os.pwrite(fd, data[:_PART_BYTES], at)
        data, at = data[done:], at + done


def read_all(fd: int, *, direct: bool = False) -> bytes:
    """Read the file from its beginning to its end."""
    memory = mmap.mmap(-1, _PART_BYTES)
    parts: list[bytes] = []
    at = 0
    while (done := os.preadv(fd, [memory], at)) > 0:
        parts.append(memory[:done])
        at += done
        if direct and done % ALIGNED:
            break  # the end: an offset that is not aligned cannot be asked for
    return b"".join(parts)


def copy_of(mapping: mmap.mmap) -> bytes:
    """Return what *mapping* holds, by a system call: a page that cannot be had is an OSError.

    A load by the process itself would be its end (SIGBUS).
    """
    fd = os.memfd_create("copy")
    try:
        with memoryview(mapping) as whole:
            write_all(fd, whole)
        return read_all(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    """Close *fd* at the end; an error of the close counts unless there was one before."""
    try:
        yield fd
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(fd)
        raise
    os.close(fd)
