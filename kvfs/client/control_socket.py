"""Control sockets: one line of JSON to a running server, one line back; and the socket files.

Synchronous and light, so that ``kvfs status`` starts fast. The protocol is described in
mount/control/socket.py.
"""

import errno
import fcntl
import json
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Final

from kvfs.client.late_answer import no_answer
from kvfs.core import errors
from kvfs.core.errors import CommandError, NotMounted, NotRoot, ServeFailed, SourceBusy, UsageError
from kvfs.core.mount_name import RUN_DIRECTORY, SOCKET_SUFFIX
from kvfs.machine.process_ends import has_exited

PROTOCOL_VERSION: Final = 1
#: Longest request: verbs take a few names and numbers.
LINE_MAX_BYTES: Final = 64 * 1024
#: Longest reply; a status with every counter takes a few KiB.
REPLY_MAX_BYTES: Final = 1 << 20
#: No event tells that a listening socket has room for another connection.
_BACKLOG_POLL_S: Final = 0.02
#: struct ucred of unix(7): pid, uid, gid of the other side.
PEERCRED: Final = struct.Struct("iII")

_BY_EXIT_CODE: Final[dict[int, type[CommandError]]] = {
    kind.exit_code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, CommandError)
}


class ServerGone(NotMounted):
    """There is a control socket, but no server listens: it was killed."""

    exit_code: ClassVar[int] = NotMounted.exit_code


class HungUp(ServeFailed):
    """The server ended, or was ended, before it answered."""

    exit_code: ClassVar[int] = ServeFailed.exit_code


def socket_paths(directory: str = RUN_DIRECTORY, suffix: str = SOCKET_SUFFIX) -> list[str]:
    """Return the paths of all control sockets, those of dead servers included.

    Sockets for scrapes have another *suffix*.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return [f"{directory}/{name}" for name in sorted(names) if name.endswith(suffix)]


def ask(
    path: str, do: str, args: Mapping[str, object] | None = None, *, timeout_s: float = 10.0
) -> dict[str, Any]:
    """Return the result of the verb *do* of the server behind the socket *path*.

    Raises ServerGone if nobody listens, NotMounted if there is no socket, NotRoot if this user may
    not use it, UsageError for more paths than a request holds, ServeFailed if no whole reply came
    within *timeout_s* (HungUp if the server ended before, WaitsForDevice if its device is why), and
    the error that the server answered.
    """
    request = json.dumps({"v": PROTOCOL_VERSION, "do": do, "args": dict(args or {})}) + "\n"
    if len(request) > LINE_MAX_BYTES:
        raise UsageError("too many paths for one request; give their directory")
    deadline_s = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(timeout_s)
        try:
            _connect(connection, path, deadline_s)
            connection.sendall(request.encode())
            line = _read_line(connection, deadline_s)
        except (FileNotFoundError, NotADirectoryError):
            raise NotMounted(f"no kvfs server: {path} does not exist") from None
        except ConnectionRefusedError:
            raise ServerGone(f"{path} is stale: its server is dead") from None
        except PermissionError:
            raise NotRoot(
                f"{path} is for root; run this as root (for the status the group of the setting "
                "control_group will do)"
            ) from None
        except TimeoutError:
            raise no_answer(path, _peer_of(connection), timeout_s) from None
        except (ConnectionResetError, BrokenPipeError):
            raise HungUp(f"{path}: the server hung up") from None
        except OSError as error:
            raise ServeFailed(f"{path}: {error.strerror or error}") from None
    return _result(path, line)


def _connect(connection: socket.socket, path: str, deadline_s: float) -> None:
    """Connect; wait while the queue of a hanging server is full (EAGAIN)."""
    while True:
        try:
            return connection.connect(path)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise TimeoutError from None
        time.sleep(_BACKLOG_POLL_S)


def peer_pid(path: str) -> int:
    """Return the pid of the process that listens on the socket *path*; 0 if none does.

    The kernel knows it without the server's help (SO_PEERCRED, unix(7)).
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.setblocking(False)
        return _peer_of(connection) if connection.connect_ex(path) == 0 else 0


def _peer_of(connection: socket.socket) -> int:
    """Return the pid of the process that listens at the other end; 0 if not connected."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEERCRED.size)
    return int(PEERCRED.unpack(raw)[0])


def _read_line(connection: socket.socket, deadline_s: float) -> bytes:
    """Return one line, all of which must come before the deadline."""
    received = bytearray()
    while not received.endswith(b"\n"):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        part = connection.recv(65_536)
        if not part:
            raise ConnectionResetError("the server hung up")
        received += part
        if len(received) > REPLY_MAX_BYTES:
            raise OSError(errno.EMSGSIZE, "the reply is too long")
    return bytes(received)


def _result(path: str, line: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        raise ServeFailed(f"{path}: the reply is not JSON") from None
    if not isinstance(reply, dict) or reply.get("v") != PROTOCOL_VERSION:
        raise ServeFailed(f"{path}: the server speaks another protocol version")
    if reply.get("ok") is not True:
        kind = _BY_EXIT_CODE.get(reply.get("exit_code", 0), ServeFailed)
        raise kind(str(reply.get("error", "the server gave no reason")))
    result = reply.get("result")
    if not isinstance(result, dict):
        raise ServeFailed(f"{path}: the reply holds no result")
    return result


@contextmanager
def locked_directory(directory: str) -> Iterator[None]:
    """Hold the directory's lock, so that two starting servers do not remove each other's socket.

    Makes the directory if it is missing. Raises OSError if it cannot be made or locked.
    """
    os.makedirs(directory, mode=0o755, exist_ok=True)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Others hold it for a few system calls, or for one more check of a dead mount.
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _has_exited(connection: socket.socket) -> bool:
    """Whether the process that listens at the other end has exited."""
    pid = _peer_of(connection)
    return pid > 0 and has_exited(pid)


def remove_stale(path: str, *, of_held_up: bool = True) -> None:
    """Remove the socket file of a dead server; the caller holds the directory's lock.

    *of_held_up*: also if it was killed, but the kernel holds up a thread of it. Raises SourceBusy
    if a server listens there, OSError if *path* is something else.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as attempt:
        attempt.setblocking(False)
        result = attempt.connect_ex(path)
        exited = result == 0 and _has_exited(attempt)
    if exited:  # it was killed, and a thread that the kernel holds up keeps its socket
        if of_held_up:
            os.unlink(path)
        return
    if result == errno.ENOENT:
        return
    if result == errno.ECONNREFUSED:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):  # connect(2) to any other file fails alike
            raise OSError(errno.ENOTSOCK, "is not a socket")
        os.unlink(path)
        return
    if result in (0, errno.EAGAIN):  # EAGAIN: its backlog is full, so it listens
        raise SourceBusy(f"another kvfs server already uses this name (control socket {path})")
    raise OSError(result, os.strerror(result))
