"""A network of a test's own: nothing but a loopback, so that a server of it serves nobody else.

A process holds it, with a mount namespace in which /run is empty. What a test mounts below
``place`` meanwhile is there too; of what others have mounted nothing is, for a copy would keep
their servers alive. ``python -m tests.support.machines.own_network PLACE`` is the holder.
"""

import contextlib
import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Final

from tests.support.clients.stepping import Stepping, say
from tests.support.mounts.mounting import ROOT, mounted_at, workplace

#: <linux/sockios.h> and netdevice(7).
_SIOCGIFFLAGS: Final = 0x8913
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 1
_INTERFACE: Final = struct.Struct("16sh22x")
#: How the places of all tests are called (``mounting.workplace``).
_PLACES: Final = "/kvfs-test-"


class Network:
    """It is there until its context is left; ``inside`` puts a command into it."""

    def __init__(self, holder_pid: int, place: Path) -> None:
        self._holder_pid = holder_pid
        self.place = place
        """A directory in memory. What is mounted below it is seen inside as well."""

    def inside(self, *command: str) -> list[str]:
        """Return the command line that runs *command* in it, and ends with whoever started it."""
        enter = ("nsenter", "-t", str(self._holder_pid), "--net", "--mount", f"--wd={ROOT}")
        return ["setpriv", "--pdeathsig", "KILL", *enter, "--", *command]

    def start(
        self, *command: str, output: IO[bytes], environment: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start *command* in it, with more *environment*; what it prints goes to *output*."""
        return subprocess.Popen(
            self.inside(*command),
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def shown(self, path: str) -> Path:
        """Return where a file of it, by the absolute *path* that it has there, is seen here."""
        return Path(f"/proc/{self._holder_pid}/root{path}")


@contextlib.contextmanager
def own_network() -> Iterator[Network]:
    """Make one, with a fresh place; leaving it takes away both. What runs in it was ended before.

    Its place is a mount that hands on what is mounted below (mount_namespaces(7)): a machine's own
    tree need not.
    """
    with workplace("disk") as parent:
        memory = ("-t", "tmpfs", "-o", "size=90%,mode=755", "kvfs-test")
        with mounted_at(parent / "place", *memory) as place:
            subprocess.run(["mount", "--make-shared", place], check=True)
            unshared = ("unshare", "--net", "--mount", "--propagation", "slave")
            with Stepping("tests.support.machines.own_network", place, prefix=unshared) as holder:
                assert holder.at() == "up"
                yield Network(holder.pid, place)


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = _INTERFACE.pack(b"lo", 0)
        _, flags = _INTERFACE.unpack(fcntl.ioctl(any_socket, _SIOCGIFFLAGS, asked))
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, _INTERFACE.pack(b"lo", flags | _IFF_UP))


def _let_go_of_others(place: str) -> None:
    """Unmount the copies of what other tests have mounted, the inner ones first."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    for path in reversed([line.split()[4] for line in lines]):
        if _PLACES in path and path != place:
            subprocess.run(["umount", "--lazy", path], check=False, stderr=subprocess.DEVNULL)


def _hold(place: str) -> None:
    _raise_loopback()
    _let_go_of_others(place)
    subprocess.run(["mount", "-t", "tmpfs", "kvfs-test", "/run"], check=True)
    say("up")


if __name__ == "__main__":
    _hold(sys.argv[1])
