"""What a recorded drive was sent: its writes with their bytes, and its flushes, in order.

A record is three files: ``ops``, one row of 24 bytes a request; ``bytes``, what was written, one
write after the other; and ``base``, the drive as it was when the recording began. Times are of
CLOCK_MONOTONIC, which every process of the machine shares.
"""

import contextlib
import mmap
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tests.support.devices.failing_drive import FailingDrive, served_drive

#: Time in ns, offset on the drive (FLUSH: a flush) and length in bytes.
OP: Final = struct.Struct("<QqQ")
FLUSH: Final = -1
_ROW: Final = np.dtype([("t_ns", "<u8"), ("offset", "<i8"), ("length", "<u8")])
_PIECE_BYTES: Final = 1 << 20
_BLOCK_BYTES: Final = 4096


class Recorded:
    """A drive that is being recorded, and where the record is."""

    def __init__(self, drive: FailingDrive, place: Path, record: Path) -> None:
        self.drive = drive
        self.path = drive.path
        self.record = record
        self._file = place / "file"

    def begin(self) -> None:
        """Begin here: what was written so far is the base. Nothing may be mounted on it now."""
        self.drive.write_back()
        (self.record / "base").unlink(missing_ok=True)
        copy_data(self._file, self.record / "base")
        for name in ("ops", "bytes"):
            os.truncate(self.record / name, 0)


@contextlib.contextmanager
def recorded_drive(place: Path, size_bytes: int) -> Iterator[Recorded]:
    """Yield a blank drive of *size_bytes*; its record stays in *place*/record."""
    record = place / "record"
    record.mkdir()
    with served_drive(
        "tests.support.devices.power_cuts.recording_drive_program", place, size_bytes, record
    ) as drive:
        yield Recorded(drive, place, record)
    (place / "file").unlink()


class Recording:
    """A finished record, to be read."""

    def __init__(self, record: Path) -> None:
        self.base = record / "base"
        rows = np.fromfile(record / "ops", _ROW)
        self.t_ns: NDArray[np.uint64] = rows["t_ns"]
        self.offset: NDArray[np.int64] = rows["offset"]
        self.length: NDArray[np.int64] = rows["length"].astype(np.int64)
        self._at = np.concatenate(([0], np.cumsum(self.length)))
        self.flushes = np.flatnonzero(self.offset == FLUSH)
        with (record / "bytes").open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)

    def __len__(self) -> int:
        return len(self.offset)

    def data(self, op: int) -> memoryview:
        """Return what write number *op* wrote."""
        return memoryview(self._bytes)[self._at[op] : self._at[op + 1]]

    def flushed_before(self, end: int, back: int = 0) -> int:
        """Return how many requests are surely on the drive at request number *end*.

        *back*: the drive lied about so many flushes.
        """
        passed = int(np.searchsorted(self.flushes, end)) - back
        return int(self.flushes[passed - 1]) + 1 if passed > 0 else 0

    def written_twice(self) -> NDArray[np.int64]:
        """Return the writes that overwrite a block written since the last flush."""
        found, seen = [], set[int]()
        for op, (offset, length) in enumerate(zip(self.offset, self.length, strict=True)):
            if offset == FLUSH:
                seen.clear()
                continue
            blocks = set(range(offset // _BLOCK_BYTES, -(-(offset + length) // _BLOCK_BYTES)))
            if blocks & seen:
                found.append(op)
            seen |= blocks
        return np.array(found, np.int64)


def copy_data(path: Path, to: Path) -> None:
    """Copy a sparse file; what is zero becomes a hole."""
    with path.open("rb") as source, to.open("wb") as target:
        size_bytes = os.fstat(source.fileno()).st_size
        os.truncate(target.fileno(), size_bytes)
        for start, end in data_of(source.fileno()):
            for at in range(start, end, _PIECE_BYTES):
                piece = os.pread(source.fileno(), min(_PIECE_BYTES, end - at), at)
                if piece.count(0) != len(piece):
                    os.pwrite(target.fileno(), piece, at)


def data_of(fd: int) -> Iterator[tuple[int, int]]:
    """Yield where the data of a sparse file begin and end."""
    at = 0
    while True:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # ENXIO: nothing but a hole up to the end
            return
        end = os.lseek(fd, at, os.SEEK_HOLE)
        yield at, end
        at = end


def keep(image: Path, to: Path) -> None:
    """Keep *image* to be looked at."""
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(image, to)
