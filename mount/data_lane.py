"""The fast lane of bytes that go through the daemon: READ of what is in memory, WRITE into it.

Behind libfuse and pyfuse3 each of them is copied twice more and waits for a thread. Whatever would
wait here for the device goes that way still, since nothing may wait here (RWF_NOWAIT, preadv2(2)).
"""

import os
from typing import Final

from mount.channel import REQUEST_MAX_BYTES, Answer, Message
from mount.files import Files
from mount.wire import (
    OUT_HEADER,
    OUT_HEADER_BYTES,
    READ_IN,
    WRITE_IN,
    WRITE_OUT,
    Opcode,
    data_reply,
)


class DataLane:
    """The two answers; both run on the trio thread and never wait.

    What one of them raises the channel answers, as for every opcode.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._preadv: Final = files.store.pool.syscalls.preadv
        self._reply: Final = memoryview(bytearray(REQUEST_MAX_BYTES))

    def answers(self) -> dict[int, Answer]:
        """Return the answers by opcode."""
        return {Opcode.READ: self._read, Opcode.WRITE: self._write}

    def _read(self, unique: int, _nodeid: int, request: memoryview) -> Message | None:
        fh, offset_bytes, size_bytes, _, _, _, _ = READ_IN.unpack_from(request)
        if size_bytes > REQUEST_MAX_BYTES - OUT_HEADER_BYTES:
            return None
        data = self._reply[OUT_HEADER_BYTES : OUT_HEADER_BYTES + size_bytes]
        fd = self._files.extent_fd(fh)
        try:
            found_bytes = self._preadv(fd, [data], offset_bytes, os.RWF_NOWAIT)
            if found_bytes < size_bytes and offset_bytes + found_bytes < os.fstat(fd).st_size:
                return None  # the rest is not in memory
        except OSError:
            return None  # nothing is; or the device fails, which the thread finds out
        length_bytes = OUT_HEADER_BYTES + found_bytes
        OUT_HEADER.pack_into(self._reply, 0, length_bytes, 0, unique)
        return self._reply[:length_bytes]

    def _write(self, unique: int, _nodeid: int, request: memoryview) -> Message | None:
        fh, offset_bytes, size_bytes, _, _, _, _ = WRITE_IN.unpack_from(request)
        data = request[WRITE_IN.size :]
        if len(data) != size_bytes or not self._files.write_at_once(fh, offset_bytes, data):
            return None
        return data_reply(unique, WRITE_OUT.pack(size_bytes, 0))
