"""What the supervisor holds, and what it tells systemd, which keeps the same files.

Each message to systemd is one datagram, as in sd_notify(3), sd_watchdog_enabled(3) and
sd_listen_fds(3). Its store of open files (FileDescriptorStoreMax= of systemd.service(5)) outlives
this process.
"""

import contextlib
import json
import math
import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Final

from kvfs.machine.held_files import ALIVE_SHARE

#: SD_LISTEN_FDS_START of sd_listen_fds(3).
_FIRST_FD: Final = 3
_PREFIX: Final = "kvfs-"
_OURS: Final = (
    *("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"),
    *("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "FDSTORE"),
)

#: Of the files that servers give us, those whose meaning we know.
_FUSE: Final = "fuse"
_ABORT: Final = "abort"
#: Our own: it holds the figures, and no server is given it.
_COUNTS: Final = "counts"
_COUNTS_BYTES: Final = 4096


class Systemd:
    """systemd; if it did not start us, nothing is sent, and it kept nothing."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Take what is for us out of *environment*, so that no server inherits it."""
        told = {name: environment.pop(name, "") for name in _OURS}
        address = told["NOTIFY_SOCKET"]
        # "@" is the abstract namespace of unix(7).
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_s = _seconds(told["WATCHDOG_USEC"]) if _for_us(told["WATCHDOG_PID"]) else 0.0
        """Seconds of silence after which it kills us (WatchdogSec=); 0: never."""
        self.alive_every_s = self.watchdog_s * ALIVE_SHARE
        self.alive_due_s = 0.0 if self.watchdog_s else math.inf
        """When it is to hear from us next (monotonic)."""
        self.kept = _kept(told) if told["LISTEN_PID"] == str(os.getpid()) else {}
        """The open files that were stored, by name."""

    def notify(self, *assignments: str) -> bool:
        """Send assignments such as ``READY=1``; False if it did not ask for them.

        Never raises and never blocks: a lost message must not cost the mount.
        """
        return self._send(assignments)

    def say_alive(self, now_s: float) -> None:
        """Say that we live if that is due, also while no server does."""
        if now_s >= self.alive_due_s:
            self.alive_due_s = now_s + self.alive_every_s
            self.notify("WATCHDOG=1")

    def say_progress(self, progress: Mapping[str, Any]) -> None:
        """Have it wait longer while a server makes *progress* in a long start."""
        if "of" in progress:
            self.notify(
                f"STATUS=rebuilding the index: {progress['done']} of {progress['of']} files",
                f"EXTEND_TIMEOUT_USEC={progress['wait_s'] * 1_000_000}",
            )

    def store(self, name: str, fd: int) -> bool:
        """Have it keep *fd* as *name*, in place of what it kept under that name."""
        self.remove(name)
        # FDPOLL=0: otherwise it would drop /dev/fuse as soon as the mount is gone.
        return self._send(("FDSTORE=1", f"FDNAME={_PREFIX}{name}", "FDPOLL=0"), [fd])

    def remove(self, name: str) -> bool:
        """Have systemd close the descriptors that it keeps as *name*."""
        return self._send(("FDSTOREREMOVE=1", f"FDNAME={_PREFIX}{name}"))

    def _send(self, assignments: Sequence[str], fds: Sequence[int] = ()) -> bool:
        if not self._address:
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.setblocking(False)
            try:
                channel.connect(self._address)
                socket.send_fds(channel, ["\n".join(assignments).encode()], list(fds))
            except OSError:
                return False
        return True


def _for_us(pid: str) -> bool:
    return pid in ("", str(os.getpid()))


def _seconds(microseconds: str) -> float:
    with contextlib.suppress(ValueError):
        return int(microseconds) / 1e6
    return 0.0


def _kept(told: MutableMapping[str, str]) -> dict[str, int]:
    """Return the stored files, by name; those without one of our names are closed."""
    kept: dict[str, int] = {}
    for number, name in enumerate(told["LISTEN_FDNAMES"].split(":")):
        if number >= int(told["LISTEN_FDS"] or 0):
            break
        fd = _FIRST_FD + number
        os.set_inheritable(fd, False)
        if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) not in kept:
            kept[name.removeprefix(_PREFIX)] = fd
        else:
            os.close(fd)
    return kept


class Holdings:
    """The open files of one mount by name, in systemd's store as well, and three figures.

    It knows the meaning of two of the files only: without ``fuse`` no server can take over, and a
    write to ``abort`` ends all calls on the mount.
    """

    def __init__(self, systemd: Systemd) -> None:
        """Take what *systemd* kept when the supervisor before us died."""
        self._systemd = systemd
        self.files = systemd.kept
        self.counts: dict[str, float] = {"restarts": 0, "upgrades": 0, "longest_pause_s": 0.0}
        self._counts_fd = self.files.pop(_COUNTS, -1)
        if self._counts_fd < 0:
            self._counts_fd = os.memfd_create("kvfs-counts", os.MFD_CLOEXEC)
            systemd.store(_COUNTS, self._counts_fd)
        with contextlib.suppress(ValueError):  # it is empty, or half of it was written
            self.counts.update(json.loads(os.pread(self._counts_fd, _COUNTS_BYTES, 0)))

    @property
    def can_go_on(self) -> bool:
        """Whether another server can take the place of one that has died."""
        return _FUSE in self.files

    def hold(self, name: str, fd: int) -> None:
        """Hold *fd* as *name*; a file that was held under that name is closed."""
        before = self.files.get(name)
        self.files[name] = fd
        if before is not None:
            os.close(before)
        self._systemd.store(name, fd)

    def drop(self, name: str) -> None:
        """Close what is held as *name*, if anything is."""
        fd = self.files.pop(name, None)
        if fd is not None:
            self._systemd.remove(name)
            os.close(fd)

    def drop_all(self) -> None:
        """Close everything."""
        for name in list(self.files):
            self.drop(name)
        self._systemd.remove(_COUNTS)

    def end_calls(self) -> None:
        """Make all calls on the mount end with an error, and close everything."""
        with contextlib.suppress(OSError):
            if _ABORT in self.files:
                os.write(self.files[_ABORT], b"1")
        self.drop_all()

    def note_counts(self) -> None:
        """Save the counts for a supervisor after us."""
        with contextlib.suppress(OSError):
            text = json.dumps(self.counts).encode()
            os.ftruncate(self._counts_fd, 0)
            os.pwrite(self._counts_fd, text, 0)
