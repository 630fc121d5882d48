"""The fast lane of the daemon path: a READ whose bytes are in memory is answered at once.

Behind libfuse and pyfuse3 each of them is copied twice more and waits for a thread. What is not
in the page cache waits for the device there, since nothing may wait here (RWF_NOWAIT, preadv2(2)).
"""

import os
from typing import Final

from mount.channel import REQUEST_MAX_BYTES, Answer, Message
from mount.files import Files
from mount.wire import OUT_HEADER, OUT_HEADER_BYTES, READ_IN, Opcode


class ReadLane:
    """The one answer; it runs on the trio thread and never waits.

    What it raises the channel answers, as for every opcode.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._preadv: Final = files.store.pool.syscalls.preadv
        self._reply: Final = memoryview(bytearray(REQUEST_MAX_BYTES))

    def answers(self) -> dict[int, Answer]:
        """Return the answer by its opcode."""
        return {Opcode.READ: self._read}

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
