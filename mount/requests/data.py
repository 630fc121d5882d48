"""READ and WRITE on the daemon path: answered at once if nothing has to wait, else by a task.

They do not go through libfuse, which would copy the bytes twice more and wait for a thread.
Besides, the socket between libfuse and us loses an answer of a megabyte when memory is short, and
then the caller would wait for ever.
"""

from typing import Final

from mount.files.transfers import Transfers
from mount.fuse.channel import REQUEST_MAX_BYTES, Answer, Message
from mount.fuse.well_formed import TRANSFER_MAX_BYTES
from mount.fuse.wire import (
    OUT_HEADER,
    OUT_HEADER_BYTES,
    READ_IN,
    WRITE_IN,
    WRITE_OUT,
    Opcode,
    data_reply,
)
from mount.requests.late import Late


class DataRequests:
    """The two answers; both run on the trio thread and never wait.

    The channel answers with an errno for an exception, and for a malformed request.
    """

    def __init__(self, transfers: Transfers, late: Late, *, at_once: bool) -> None:
        """Without *at_once* a task answers every request."""
        self._transfers = transfers
        self._late = late
        self._at_once = at_once
        self._reply: Final = memoryview(bytearray(REQUEST_MAX_BYTES))

    def answers(self) -> dict[int, Answer]:
        """Return the answers by opcode."""
        return {Opcode.READ: self._read, Opcode.WRITE: self._write}

    def _read(self, unique: int, _nodeid: int, request: memoryview) -> Message | None:
        fh, offset_bytes, size_bytes, _, _, _, _ = READ_IN.unpack_from(request)
        if size_bytes > TRANSFER_MAX_BYTES:
            return None
        if self._at_once:
            data = self._reply[OUT_HEADER_BYTES : OUT_HEADER_BYTES + size_bytes]
            found_bytes = self._transfers.read_at_once(fh, offset_bytes, data)
            if found_bytes >= 0:
                length_bytes = OUT_HEADER_BYTES + found_bytes
                OUT_HEADER.pack_into(self._reply, 0, length_bytes, 0, unique)
                return self._reply[:length_bytes]
        return self._late.answer(unique, lambda: self._transfers.read(fh, offset_bytes, size_bytes))

    def _write(self, unique: int, _nodeid: int, request: memoryview) -> Message | None:
        fh, offset_bytes, size_bytes, _, _, _, _ = WRITE_IN.unpack_from(request)
        data = request[WRITE_IN.size :]
        if len(data) != size_bytes:
            return None
        if self._at_once and self._transfers.write_at_once(fh, offset_bytes, data):
            return data_reply(unique, WRITE_OUT.pack(size_bytes, 0))
        own = bytes(data)  # the next request overwrites that buffer

        async def write() -> bytes:
            aside = self._late.about_to_wait
            return WRITE_OUT.pack(await self._transfers.write(fh, offset_bytes, own, aside), 0)

        return self._late.answer(unique, write)
