"""A log that a client appends to, and a long listing: what takes many requests on one open file.

A server that was killed may have appended what a request brought. If the next one does so again,
the log has a record twice; if it loses its place in a listing, names are missing or come twice.
"""

import os
import random
from collections import Counter
from typing import Final

from tests.support.kills.soak.owner import Fault

_LOG_MAX_BYTES: Final = 256 << 10
_RECORD_MAX_BYTES: Final = 6000
_NAMES: Final = 1000


class Logs:
    """The log of one client, which it keeps open, and a directory of a thousand names."""

    def __init__(self, directory: str, draw: random.Random) -> None:
        self._path, self._many, self._draw = f"{directory}/log", f"{directory}/many", draw
        os.mkdir(self._many)
        for number in range(_NAMES):
            os.symlink("nowhere", f"{self._many}/{number:04d}")
        self._names = Counter(os.listdir(self._many))
        self._serial = 0
        self._fd = -1
        self._bytes = b""

    def append(self) -> None:
        """Append a record; look at the whole log at times, and begin another when it is long."""
        if self._fd < 0:
            self._bytes = b""
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._serial += 1
        record = b"%d\n" % self._serial * self._draw.randint(1, _RECORD_MAX_BYTES // 8)
        self._bytes += record
        if (written := os.write(self._fd, record)) != len(record):
            raise Fault(f"{written} of {len(record)} bytes were appended")
        if self._draw.random() < 0.1:
            self._look()
        if len(self._bytes) > _LOG_MAX_BYTES:
            self._look()
            fd, self._fd = self._fd, -1
            os.close(fd)
            os.unlink(self._path)

    def _look(self) -> None:
        found = os.pread(self._fd, 2 * _LOG_MAX_BYTES, 0)
        if found != self._bytes:
            same = zip(found, self._bytes, strict=False)
            at = next((at for at, (one, other) in enumerate(same) if one != other), "their end")
            raise Fault(f"{len(found)} bytes differ at {at} from {len(self._bytes)} of the log")

    def list_many(self) -> None:
        """List the long directory: each name must come once."""
        found = Counter(os.listdir(self._many))
        if found != self._names:
            raise Fault(f"listed otherwise: {found - self._names}, missing {self._names - found}")
