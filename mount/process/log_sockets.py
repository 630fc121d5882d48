"""Log records to the journal or to syslog: one datagram a record, never waiting for the reader.

The journal's own protocol is documented at https://systemd.io/JOURNAL_NATIVE_PROTOCOL/, the
line that syslog takes at /dev/log in syslog(3).
"""

import logging
import os
import socket
import struct
from typing import Final

JOURNAL_SOCKET: Final = "/run/systemd/journal/socket"
SYSLOG_SOCKET: Final = "/dev/log"
#: A datagram above the socket's send buffer would need a memfd; no line of ours is worth that.
MESSAGE_MAX_BYTES: Final = 32 * 1024

_LENGTH: Final = struct.Struct("<Q")
_DAEMON_FACILITY: Final = 3 << 3  # LOG_DAEMON of syslog(3)


class DatagramHandler(logging.Handler):
    """Sends records to the unix socket *path*; what its reader does not take is counted."""

    def __init__(self, pool: str, path: str) -> None:
        """Raises OSError when nobody listens at *path*."""
        super().__init__()
        self.dropped = 0
        self._pool = pool
        self._path = path
        self._channel = self._connected()

    def emit(self, record: logging.LogRecord) -> None:
        datagram = self.datagram(record)
        try:
            self._channel.send(datagram)
        except BlockingIOError:
            self.dropped += 1
        except OSError:  # the reader was restarted, and its socket with it
            self._send_again(datagram)

    def datagram(self, record: logging.LogRecord) -> bytes:
        """Return the record as the reader wants it."""
        raise NotImplementedError

    def close(self) -> None:
        self._channel.close()
        super().close()

    def _connected(self) -> socket.socket:
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        channel.setblocking(False)
        try:
            channel.connect(self._path)
        except OSError:
            channel.close()
            raise
        return channel

    def _send_again(self, datagram: bytes) -> None:
        try:
            fresh = self._connected()
        except OSError:
            self.dropped += 1
            return
        self._channel.close()
        self._channel = fresh
        try:
            self._channel.send(datagram)
        except OSError:
            self.dropped += 1


class JournalHandler(DatagramHandler):
    """Sends records to the journal, with the pool's name as a field to filter by."""

    def __init__(self, pool: str, path: str = JOURNAL_SOCKET) -> None:
        super().__init__(pool, path)

    def datagram(self, record: logging.LogRecord) -> bytes:
        fields = {
            "MESSAGE": self.format(record),
            "PRIORITY": str(priority_of(record.levelno)),
            "SYSLOG_IDENTIFIER": "kvfs",
            "KVFS_POOL": self._pool,
            "LOGGER": record.name,
            "CODE_FILE": record.pathname,
            "CODE_LINE": str(record.lineno),
        }
        return b"".join(_assign(key, value) for key, value in fields.items())


class SyslogHandler(DatagramHandler):
    """Sends records to syslog."""

    def __init__(self, pool: str, path: str = SYSLOG_SOCKET) -> None:
        super().__init__(pool, path)

    def datagram(self, record: logging.LogRecord) -> bytes:
        priority = _DAEMON_FACILITY | priority_of(record.levelno)
        line = f"<{priority}>kvfs[{os.getpid()}]: {self._pool}: {self.format(record)}"
        return line.encode(errors="backslashreplace")[:MESSAGE_MAX_BYTES]


def priority_of(level: int) -> int:
    """Return the syslog(3) priority of a logging level."""
    if level >= logging.CRITICAL:
        return 2
    if level >= logging.ERROR:
        return 3
    if level >= logging.WARNING:
        return 4
    return 6 if level >= logging.INFO else 7


def _assign(key: str, value: str) -> bytes:
    raw = value.encode(errors="backslashreplace")[:MESSAGE_MAX_BYTES]
    if b"\n" in raw:
        return key.encode() + b"\n" + _LENGTH.pack(len(raw)) + raw + b"\n"
    return key.encode() + b"=" + raw + b"\n"
