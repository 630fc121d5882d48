"""Writes a supervisor's messages to its server's log, as there may be no server to do it.

The format is that of mount/process/logs.py, whose imports are too large for this process.
"""

import contextlib
import os
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from typing import Final

SYSLOG_SOCKET: Final = "/dev/log"
#: LOG_DAEMON of syslog(3), and its levels.
_DAEMON: Final = 3 << 3
_LEVELS: Final = {"ERROR": 3, "WARNING": 4, "INFO": 6}


class ServersLog:
    """The place where the server logs, once it has said so; stderr before."""

    def __init__(self) -> None:
        self._place = "stderr"
        self._name = ""
        self._dead_path = ""

    def is_at(self, place: str, name: str, dead_path: str) -> None:
        """Write to *place* from now on: stderr, syslog, nowhere, or a file; for the pool *name*.

        *dead_path* is the file for the very last line (``leave``), which ``kvfs status`` shows.
        """
        self._place, self._name, self._dead_path = place, name, dead_path

    def leave(self, why: str) -> None:
        """Write *why* no server can be started any more, for ``kvfs status``. Never raises."""
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            fd = os.open(self._dead_path, flags, 0o644)
            try:
                os.write(fd, why.encode("ascii", "backslashreplace"))
            finally:
                os.close(fd)

    def serves(self) -> None:
        """Remove what an earlier supervisor left there."""
        with contextlib.suppress(OSError):
            os.unlink(self._dead_path)

    def say(self, level: str, line: str) -> None:
        """Write one line. Never raises, and never blocks."""
        line = line.encode("ascii", "backslashreplace").decode().replace("\n", "\\n")
        try:
            if self._place == "syslog":
                self._to_syslog(level, line)
            elif self._place == "stderr":
                os.write(2, f"{_now()} {level} kvfs.supervisor: {line}\n".encode())
            elif self._place != "nowhere":
                self._to_file(f"{_now()} {level} kvfs.supervisor: {line}\n")
        except OSError:
            pass  # then the line is lost

    def _to_syslog(self, level: str, line: str) -> None:
        priority = _DAEMON | _LEVELS[level]
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.setblocking(False)
            told = f"<{priority}>kvfs[{os.getpid()}]: {self._name}: kvfs.supervisor: {line}"
            channel.sendto(told.encode(), SYSLOG_SOCKET)

    def _to_file(self, line: str) -> None:
        # Opened for each line: logrotate may have moved it.
        fd = os.open(self._place, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)


def back_again(arguments: Sequence[str]) -> str:
    """Return a clause: how to bring a mount back whose server had these ``kvfs`` *arguments*."""
    words, place = list(arguments), ""
    if "--started-in" in words:
        at = words.index("--started-in")
        place = f" in {words[at + 1]}" if words[at + 1 : at + 2] != ["/"] else ""
        del words[at : at + 2]
    again = shlex.join(["kvfs", *(word for word in words if word != "--foreground")])
    return f"`{again}`{place}, or a start of its unit, brings it back"


def _now() -> str:
    now_s = time.time()
    whole = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now_s))
    return f"{whole},{int(now_s % 1 * 1000):03d}"


def release_terminal() -> None:
    """Release the terminal that the mount was started from."""
    sys.stderr.flush()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)
    os.close(null)
