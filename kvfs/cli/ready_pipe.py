"""How a server reports to the command that started it in the background.

It gets lines of JSON through a pipe: ``{"done": N, "of": N}`` while the index is rebuilt, and then
``{"ready": true}`` or ``{"error": TEXT, "exit_code": N}``.
What the supervisor and systemd are told is in kvfs/machine/held_files.py.
"""

import contextlib
import json
import os
import select
import time
from typing import Final, NamedTuple

from kvfs.cli.progress_bar import Progress

_OUTCOME_MAX_BYTES: Final = 64 * 1024


class StartOutcome(NamedTuple):
    """What the server reported; *error* is empty if it serves."""

    error: str
    exit_code: int


class ReadyPipe:
    """The server's end of the pipe. Only the first report of the end is sent."""

    def __init__(self, fd: int) -> None:
        # Programs that the server starts must not keep the pipe open.
        os.set_inheritable(fd, False)
        self._fd = fd

    @property
    def awaited(self) -> bool:
        """Whether nothing was reported yet."""
        return self._fd >= 0

    def say_progress(self, done: int, total: int) -> None:
        """Report how far the rebuild of the index is."""
        with contextlib.suppress(OSError):  # nobody reads it any more
            os.write(self._fd, json.dumps({"done": done, "of": total}).encode() + b"\n")

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


def wait_for_outcome(fd: int, wait_s: float, progress: Progress) -> StartOutcome | None:
    """Return the server's report from *fd*; None if it ended without one.

    Raises TimeoutError if it reports nothing for *wait_s*, not even progress.
    """
    deadline_s = time.monotonic() + wait_s
    received = b""
    while len(received) < _OUTCOME_MAX_BYTES:
        line, end, rest = received.partition(b"\n")
        if end:
            message, received = json.loads(line), rest
            if "done" not in message:
                return StartOutcome(str(message.get("error", "")), int(message.get("exit_code", 0)))
            progress(int(message["done"]), int(message["of"]))
            deadline_s = time.monotonic() + wait_s
            continue
        left_s = max(0.0, deadline_s - time.monotonic())
        if not select.select([fd], [], [], left_s)[0]:
            raise TimeoutError
        part = os.read(fd, 4096)
        if not part:
            return None
        received += part
    return None
