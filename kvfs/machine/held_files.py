"""The link between a server and its supervisor, which holds the server's open files.

A pair of SOCK_SEQPACKET sockets: one JSON object a message, open files as SCM_RIGHTS beside it
(unix(7)). What the supervisor holds outlives the server, and is given to the next one at its start.
This module imports little, because the supervisor must stay small.
"""

import contextlib
import errno
import json
import os
import select
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvfs import __version__

#: Most files in one message, and so most that are held: SCM_MAX_FD in linux/net/scm.h is 253.
FILES_MAX: Final = 250
_MESSAGE_BYTES: Final = 16 << 10
#: Most characters of an error message; each takes at most 12 bytes of JSON.
LINE_MAX: Final = 1000
#: The supervisor answers at once; one that does not is stopped or gone.
_ANSWER_WAIT_S: Final = 1.0
#: A server says that it is alive each time this share of the longest allowed silence has passed;
#: sd_watchdog_enabled(3) wants a half.
ALIVE_SHARE: Final = 1 / 3


def link_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends; both are closed at exec."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Message(NamedTuple):
    """One message, and the open files that came with it, which its receiver owns."""

    said: dict[str, Any]
    fds: list[int]


def send(end: socket.socket, said: dict[str, object], fds: Sequence[int] = ()) -> bool:
    """Send a message without waiting; False if the other end is gone, or reads no more."""
    packet = json.dumps(said, separators=(",", ":")).encode()
    try:
        socket.send_fds(end, [packet], list(fds), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError:
        return False
    return True


def receive(end: socket.socket) -> Message | None:
    """Return the next message, waiting for it if *end* is blocking; None if the other end closed.

    Raises BlockingIOError.
    """
    try:
        packet, fds, _, _ = socket.recv_fds(end, _MESSAGE_BYTES, FILES_MAX)
    except OSError as error:
        if error.errno in (errno.ECONNRESET, errno.EPIPE):
            return None
        raise
    for fd in fds:  # not by MSG_CMSG_CLOEXEC: recv_fds of Python 3.11 passes no flags on
        os.set_inheritable(fd, False)
    return Message(json.loads(packet), fds) if packet else None


class SupervisorGone(Exception):
    """The supervisor has died, so this process is not needed any more."""


class HeldFiles:
    """The server's end. A message that cannot be sent is dropped; the mount is served anyway."""

    def __init__(self, fd: int) -> None:
        """Receive, on descriptor *fd*, what this server is given. Raises SupervisorGone."""
        self._end = socket.socket(fileno=fd)
        self._end.set_inheritable(False)
        self.lost = False
        """Whether the supervisor is gone."""
        first = receive(self._end)
        if first is None:
            raise SupervisorGone
        said, fds = first
        self.given: dict[str, int] = dict(zip(said["held"], fds, strict=True))
        """The open files that the last server had held, by name; empty at a first start."""
        self.restarts: int = said["restarts"]
        self.upgrades: int = said["upgrades"]
        self.longest_pause_s: float = said["longest_pause_s"]
        """The longest time without a server so far, with this start's once it is ready."""
        self.died_s: float = said["died_s"]
        """When the last server died, by time.monotonic(); 0 at a first start."""
        self.supervisor_pid: int = said["supervisor_pid"]
        self.alive_every_s: float = said["alive_every_s"]
        """How often the supervisor expects ``say_alive`` once this server serves; 0: never."""
        self.next_server: str = said["next_server"]
        """Why the next server may not be of this version; "": it will be."""

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is something to ``receive``."""
        return self._end.fileno()

    def receive(self) -> dict[str, Any] | None:
        """Return what the supervisor says now, {} for nothing, None if it is gone (``lost``)."""
        if self.lost:
            return None
        try:
            self._end.setblocking(False)
            message = receive(self._end)
        except BlockingIOError:
            return {}
        if message is None:
            self.lost = True
            return None
        for fd in message.fds:
            os.close(fd)
        return message.said

    def hold(self, name: str, fd: int) -> bool:
        """Let the supervisor hold a copy of *fd* as *name*, in place of an earlier one."""
        return self._say({"hold": name}, [fd])

    def say_log(self, place: str, name: str, dead_path: str) -> bool:
        """Say where this server logs (mount/process/logs.py), and the name of the pool there.

        If no server can be started any more, the reason is written to the file *dead_path*.
        """
        return self._say({"log": place, "name": name, "dead_path": dead_path})

    def drop(self, name: str) -> bool:
        """Let the supervisor close what it holds as *name*; True once it has."""
        return self._say({"drop": name}) and self._answered("dropped")

    def say_alive(self, **progress: int) -> bool:
        """Say that this server is alive, with its *progress*, such as ``done`` and ``of``."""
        return self._say({"alive": progress})

    def say_ready(self, note: str, formats: Mapping[str, int], silent_max_s: float) -> bool:
        """Say that requests are answered from now on; *note* says what is served.

        The next server must know these *formats*, numbers by name. If this one says nothing for
        *silent_max_s* (0: no limit), it counts as hanging, unless systemd sets another time.
        """
        if self.died_s:
            self.longest_pause_s = max(self.longest_pause_s, time.monotonic() - self.died_s)
        self.alive_every_s = self.alive_every_s or silent_max_s * ALIVE_SHARE
        said = {"ready": note, "version": __version__, "formats": dict(formats)}
        return self._say({**said, "silent_max_s": silent_max_s})

    def ask_for_upgrade(self, program: Sequence[str], python_path: str) -> bool:
        """Ask for another server, started by *program* with its modules in *python_path*.

        Either it starts, and this one is killed, or the supervisor says ``upgrade_failed``.
        """
        return self._say({"upgrade": list(program), "python_path": python_path})

    def say_ended(self) -> bool:
        """Say that the mount is gone for good; True once the supervisor has closed all it held."""
        return self._say({"ended": True}) and self._answered("dropped")

    def say_fatal(self, line: str, exit_code: int) -> bool:
        """Say that the start failed, and would fail again the same way."""
        return self._say({"fatal": line[:LINE_MAX], "exit": exit_code})

    def close(self) -> None:
        """Close the link; the supervisor keeps what it holds."""
        self._end.close()

    def _say(self, said: dict[str, object], fds: Sequence[int] = ()) -> bool:
        if not self.lost and not send(self._end, said, fds):
            self.lost = self._is_down()
            return False
        return not self.lost

    def _is_down(self) -> bool:
        poll = select.poll()
        poll.register(self._end, 0)
        return any(events & select.POLLHUP for _, events in poll.poll(0))

    def _answered(self, word: str) -> bool:
        """Wait for the answer with *word*, dropping other messages; False if none comes."""
        with contextlib.suppress(OSError):
            self._end.settimeout(_ANSWER_WAIT_S)
            while (message := receive(self._end)) is not None:
                if word in message.said:
                    return True
        return False
