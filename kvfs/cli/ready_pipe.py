"""How a server reports to the command that started it in the background.

It gets one line of JSON through a pipe: ``{"ready": true}`` or ``{"error": TEXT, "exit_code": N}``.
What systemd is told is in mount/process/supervisor.py.
"""

import json
import os
import select
import time
from typing import Final, NamedTuple

_OUTCOME_MAX_BYTES: Final = 64 * 1024


class Outcome(NamedTuple):
    """What the server reported; *error* is empty if it serves."""

    error: str
    exit_code: int


class ReadyPipe:
    """The server's end of the pipe. Only the first report is sent."""

    def __init__(self, fd: int) -> None:
        # Programs that the server starts must not keep the pipe open.
        os.set_inheritable(fd, False)
        self._fd = fd

    @property
    def awaited(self) -> bool:
        """Whether nothing was reported yet."""
        return self._fd >= 0

    def say_ready(self) -> None:
        """Report that the mount serves, and release the terminal."""
        self._say({"ready": True})
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(null, 2)
        os.close(null)

    def say_failed(self, line: str, exit_code: int) -> None:
        """Report why it does not serve."""
        self._say({"error": line, "exit_code": exit_code})

    def _say(self, message: dict[str, object]) -> None:
        try:
            os.write(self._fd, json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # nobody reads it any more
        finally:
            os.close(self._fd)
            self._fd = -1


def wait_for_outcome(fd: int, wait_s: float) -> Outcome | None:
    """Return the server's report from *fd*; None if it ended without one. Raises TimeoutError."""
    deadline_s = time.monotonic() + wait_s
    received = bytearray()
    while not received.endswith(b"\n") and len(received) < _OUTCOME_MAX_BYTES:
        left_s = max(0.0, deadline_s - time.monotonic())
        if not select.select([fd], [], [], left_s)[0]:
            raise TimeoutError
        part = os.read(fd, 4096)
        if not part:
            return None
        received += part
    message = json.loads(received)
    return Outcome(str(message.get("error", "")), int(message.get("exit_code", 0)))
