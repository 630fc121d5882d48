"""Locks on a mount: two clients take turns, and hold them while servers are killed.

Who holds a lock writes that into memory that both share, outside of the mount.
"""

import errno
import fcntl
import mmap
import os
import random
import struct
import threading
from pathlib import Path
from typing import Final

from tests.support.kills.soak.owner import Fault

#: F_OFD_SETLKW of asm-generic/fcntl.h, and struct flock of 64-bit machines.
_F_OFD_SETLKW: Final = 38
_FLOCK: Final = struct.Struct("hhqqi4x")
_HELD_MAX_S: Final = 0.03
_TAKEN: Final = (errno.EAGAIN, errno.EACCES)
#: Bytes of the file that an fcntl lock covers: each lock has a range of its own.
_RANGE_BYTES: Final = 64


class Locks:
    """The locks of one client; *memory_file* is shared with the others."""

    def __init__(self, directory: str, memory_file: str, client: int, draw: random.Random) -> None:
        with open(memory_file, "r+b", buffering=0) as file:
            self._owners = mmap.mmap(file.fileno(), 0)
        self._directory, self._client, self._draw = directory, client, draw
        self._pause = threading.Event()
        self._kept = {name: self._open(name) for name in ("flock", "fcntl", "ofd")}

    @staticmethod
    def make(memory_file: Path, directory: Path) -> None:
        """Make what the clients lock, and the memory that tells who holds it."""
        memory_file.write_bytes(bytes(mmap.PAGESIZE))
        directory.mkdir()
        for name in ("flock", "fcntl", "ofd"):
            (directory / name).write_bytes(b"locked")

    def _open(self, name: str) -> int:
        return os.open(f"{self._directory}/{name}", os.O_RDWR)

    def step(self) -> None:
        """Take one lock, hold it for a moment, and give it back."""
        name = self._draw.choice(sorted(self._kept))
        # An fcntl lock ends with any descriptor of its file: only the kept one is opened.
        fresh = name != "fcntl" and self._draw.random() < 0.3
        fd = self._open(name) if fresh else self._kept[name]
        try:
            take = getattr(self, f"_{name}")
            if self._draw.random() < 0.3:
                self._try(name, fd)
            else:
                take(fd, fcntl.LOCK_EX)
                self._hold(name)
                take(fd, fcntl.LOCK_UN)
        finally:
            if fresh:
                os.close(fd)

    def _try(self, name: str, fd: int) -> None:
        if name == "ofd":
            return
        take = getattr(self, f"_{name}")
        try:
            take(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            return
        self._hold(name)
        take(fd, fcntl.LOCK_UN)

    def _hold(self, name: str) -> None:
        at = sorted(self._kept).index(name)
        if (other := self._owners[at]) != 0:
            raise Fault(f"{name}: client {other - 1} has the lock, and {self._client} got it")
        self._owners[at] = self._client + 1
        self._pause.wait(self._draw.uniform(0, _HELD_MAX_S))
        if (other := self._owners[at]) != self._client + 1:
            raise Fault(f"{name}: held by {self._client}, and {other - 1} got it")
        self._owners[at] = 0

    @staticmethod
    def _flock(fd: int, how: int) -> None:
        fcntl.flock(fd, how)

    @staticmethod
    def _fcntl(fd: int, how: int) -> None:
        fcntl.lockf(fd, how, _RANGE_BYTES, 0)

    @staticmethod
    def _ofd(fd: int, how: int) -> None:
        kind = fcntl.F_WRLCK if how == fcntl.LOCK_EX else fcntl.F_UNLCK
        fcntl.fcntl(fd, _F_OFD_SETLKW, _FLOCK.pack(kind, os.SEEK_SET, 0, _RANGE_BYTES, 0))
