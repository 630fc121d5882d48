"""utimensat(2) with UTIME_NOW sets the present time of this server's clock.

The kernel sends its own time, which advances in steps of some milliseconds. With that, a file just
created could get a time before its creation.
"""

from collections.abc import Callable
from typing import Final

from kvfs.core.types import SECOND_NS
from mount.fuse.wire import SETATTR_IN_BYTES, SETATTR_IN_TIMES, SETATTR_IN_VALID, Opcode

#: FATTR_ATIME_NOW and FATTR_MTIME_NOW of linux/fuse.h.
_ATIME_NOW: Final = 1 << 7
_MTIME_NOW: Final = 1 << 8


class PresentTime:
    """Puts the server's time into SETATTR requests that ask for the present time."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns: Final = clock_ns

    def answers(self) -> dict[int, Callable[[int, int, memoryview], None]]:
        """Return the functions that change requests, by opcode; libfuse gets the requests then."""
        return {Opcode.SETATTR: self._stamp}

    def _stamp(self, _unique: int, _nodeid: int, request: memoryview) -> None:
        if len(request) < SETATTR_IN_BYTES:
            return  # it is refused next
        (valid,) = SETATTR_IN_VALID.unpack_from(request)
        if not valid & (_ATIME_NOW | _MTIME_NOW):
            return
        now_s, now_ns = divmod(self._clock_ns(), SECOND_NS)
        offset_bytes = SETATTR_IN_VALID.size
        atime_s, mtime_s, ctime_s, atime_ns, mtime_ns, ctime_ns = SETATTR_IN_TIMES.unpack_from(
            request, offset_bytes
        )
        if valid & _ATIME_NOW:
            atime_s, atime_ns = now_s, now_ns
        if valid & _MTIME_NOW:
            mtime_s, mtime_ns = now_s, now_ns
        times = (atime_s, mtime_s, ctime_s, atime_ns, mtime_ns, ctime_ns)
        SETATTR_IN_TIMES.pack_into(request, offset_bytes, *times)
