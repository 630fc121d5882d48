"""A socket of a machine that has no memory for a message, for a while."""

import errno
import socket
from typing import Any


class ShortOfMemory:
    """A socket whose send finds no memory *times* times."""

    def __init__(self, inner: socket.socket, times: int) -> None:
        self._inner = inner
        self._times = times

    def send(self, message: memoryview) -> int:
        """Send, or fail as the kernel does without a megabyte in one piece."""
        self._times -= 1
        if self._times >= 0:
            raise OSError(errno.ENOBUFS, "No buffer space available")
        return self._inner.send(message)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._inner, name)
