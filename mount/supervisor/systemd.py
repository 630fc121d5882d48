"""What we tell systemd, how often it wants to hear from us, and the files that it keeps for us.

Each message is one datagram, as in sd_notify(3), sd_watchdog_enabled(3) and sd_listen_fds(3). Its
store of open files (FileDescriptorStoreMax= of systemd.service(5)) outlives this process.
"""

import contextlib
import os
import socket
from collections.abc import MutableMapping, Sequence
from typing import Final

from kvfs.machine.held_files import ALIVE_SHARE

#: SD_LISTEN_FDS_START of sd_listen_fds(3).
_FIRST_FD: Final = 3
_PREFIX: Final = "kvfs-"
_OURS: Final = (
    *("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"),
    *("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "FDSTORE"),
)


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
        self.kept = _kept(told) if told["LISTEN_PID"] == str(os.getpid()) else {}
        """The open files that were stored, by name."""

    def notify(self, *assignments: str) -> bool:
        """Send assignments such as ``READY=1``; False if it did not ask for them.

        Never raises and never blocks: a lost message must not cost the mount.
        """
        return self._send(assignments)

    def store(self, name: str, fd: int) -> bool:
        """Have it keep *fd* as *name*, in place of what it kept under that name."""
        self.remove(name)
        # FDPOLL=0: otherwise it would drop /dev/fuse as soon as the mount is gone.
        return self._send(("FDSTORE=1", f"FDNAME={_PREFIX}{name}", "FDPOLL=0"), [fd])

    def remove(self, name: str) -> bool:
        """Have it close what it keeps as *name*."""
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
