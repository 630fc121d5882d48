"""io_uring by its system calls alone: as much of it as a test of files needs.

Layouts: linux/io_uring.h.
"""

import ctypes
import mmap
import os
import struct
from pathlib import Path
from typing import Final, Self

_SETUP: Final = 425
_ENTER: Final = 426
_REGISTER: Final = 427
_OFF_SQ_RING: Final = 0
_OFF_SQES: Final = 0x10000000
_GETEVENTS: Final = 1
_REGISTER_BUFFERS: Final = 0
_REGISTER_FILES: Final = 2
_OP_READ_FIXED: Final = 4
_OP_OPENAT: Final = 18
_OP_CLOSE: Final = 19
_OP_WRITE: Final = 23
_FIXED_FILE: Final = 1
_ENTRIES: Final = 64
_RING_BYTES: Final = 8192
_SQE_BYTES: Final = 64
#: struct io_uring_sqe: opcode, flags, ioprio, fd, off, addr, len, op flags, user_data, buf_index,
#: personality, file_index.
_SQE: Final = struct.Struct("<BBHiQQIIQHHI16x")
assert _SQE.size == _SQE_BYTES
_U32: Final = struct.Struct("<I")
#: struct io_uring_cqe: user_data, res, flags.
_CQE: Final = struct.Struct("<Qii")

_libc = ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: object) -> int:
    done: int = _libc.syscall(ctypes.c_long(number), *arguments)
    if done < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return done


def is_disabled() -> bool:
    """Whether this kernel has no io_uring for a process like this."""
    setting = Path("/proc/sys/kernel/io_uring_disabled")
    return setting.exists() and setting.read_text().strip() == "2"


class Ring:
    """One ring. Raises OSError."""

    def __init__(self) -> None:
        params = bytearray(120)
        self.fd = _call(_SETUP, ctypes.c_uint(_ENTRIES), (ctypes.c_char * 120).from_buffer(params))
        self._sq = struct.unpack_from("<10I", params, 40)
        self._cq = struct.unpack_from("<10I", params, 80)
        size = max(self._sq[6] + 4 * _ENTRIES, self._cq[5] + _CQE.size * 2 * _ENTRIES)
        self._ring = mmap.mmap(self.fd, max(size, _RING_BYTES), offset=_OFF_SQ_RING)
        self._sqes = mmap.mmap(self.fd, _ENTRIES * _SQE_BYTES, offset=_OFF_SQES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ring.close()  # a mapping keeps the ring, and what it has open
        self._sqes.close()
        os.close(self.fd)

    def _queue(self, sqe: bytes) -> None:
        tail = _U32.unpack_from(self._ring, self._sq[1])[0]
        index = tail % _ENTRIES
        self._sqes[index * _SQE_BYTES : (index + 1) * _SQE_BYTES] = sqe
        _U32.pack_into(self._ring, self._sq[6] + 4 * index, index)
        _U32.pack_into(self._ring, self._sq[1], tail + 1)

    def _submit(self, sqe: bytes) -> None:
        self._queue(sqe)
        _call(_ENTER, self.fd, 1, 0, 0, None, 0)

    def wait(self) -> int:
        """Wait for one answer and return it. Raises OSError."""
        _call(_ENTER, self.fd, 0, 1, _GETEVENTS, None, 0)
        return self._take()

    def _take(self) -> int:
        head = _U32.unpack_from(self._ring, self._cq[0])[0]
        _, result, _ = _CQE.unpack_from(
            self._ring, self._cq[5] + _CQE.size * (head % (2 * _ENTRIES))
        )
        _U32.pack_into(self._ring, self._cq[0], head + 1)
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return int(result)

    def write(self, fd: int, memory: mmap.mmap, offset_bytes: int, *, fixed: bool = False) -> None:
        """Begin to write all of *memory* to *fd*, or to the file in slot *fd*."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        flags = _FIXED_FILE if fixed else 0
        self._submit(
            _SQE.pack(_OP_WRITE, flags, 0, fd, offset_bytes, address, len(memory), 0, 1, 0, 0, 0)
        )

    def register(self, memory: mmap.mmap) -> None:
        """Pin *memory* as buffer 0, for ``read_fixed``."""
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        one = struct.pack("<QQ", self._address, len(memory))
        _call(_REGISTER, self.fd, _REGISTER_BUFFERS, ctypes.c_char_p(one), 1)

    def read_fixed(self, fd: int, size_bytes: int, piece_bytes: int) -> int:
        """Read the first *size_bytes* of *fd* into the registered memory; return how many came.

        One system call begins all pieces, at most 64, and waits for them. Raises OSError.
        """
        starts = range(0, size_bytes, piece_bytes)
        for start in starts:
            length = min(piece_bytes, size_bytes - start)
            at = self._address + start
            self._queue(_SQE.pack(_OP_READ_FIXED, 0, 0, fd, start, at, length, 0, 4, 0, 0, 0))
        _call(_ENTER, self.fd, len(starts), len(starts), _GETEVENTS, None, 0)
        return sum(self._take() for _ in starts)

    def open_direct(self, path: Path, flags: int) -> None:
        """Open *path* into slot 0: it is never a descriptor."""
        slots = struct.pack("<i", -1)
        _call(_REGISTER, self.fd, _REGISTER_FILES, ctypes.c_char_p(slots), 1)
        name = ctypes.create_string_buffer(os.fsencode(path))
        at = ctypes.addressof(name)
        self._submit(_SQE.pack(_OP_OPENAT, 0, 0, -100, 0, at, 0o644, flags, 2, 0, 0, 1))
        self.wait()

    def close_direct(self) -> None:
        """Close the file in slot 0."""
        self._submit(_SQE.pack(_OP_CLOSE, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 1))
        self.wait()
