"""The sockets of a running server: how each is made, and the requests on the control socket.

The control socket takes JSON lines of root and of the server's own user. The members of one group
may use it too, if a setting says so, but only the verbs that change nothing.

``{"v": 1, "do": VERB, "args": {...}}`` is answered ``{"v": 1, "ok": true, "result": {...}}`` or
``{"v": 1, "ok": false, "error": TEXT, "exit_code": N}``. Nothing that a client sends may end the
server. The verbs are in verbs.py.

The sockets for events and metrics may be open to everybody on the host. Their connections are
bounded in number, in rate and in time, so a client that sends nothing, reads nothing or connects in
a loop costs the mount next to nothing. It keeps no other client away: beyond the bound the oldest
connection is cut off.
"""

import contextlib
import errno
import grp
import json
import logging
import os
import socket
from array import array
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Final

import trio

from kvfs.client.control_socket import (
    LINE_MAX_BYTES,
    PEERCRED,
    PROTOCOL_VERSION,
    locked_directory,
    remove_stale,
)
from kvfs.core.errors import CommandError, KvfsError, NotRoot, ServeFailed, UsageError

_log: Final = logging.getLogger(__name__)

Verb = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
Conversation = Callable[[trio.SocketStream], Awaitable[None]]

#: For operators and one exporter; more connections mean that a client leaks them.
CONNECTIONS_MAX: Final = 16
#: The most that members of the group may have, so that they never keep root away.
_GUESTS_MAX: Final = CONNECTIONS_MAX // 2
#: What the group may ask for.
_FOR_GUESTS: Final = frozenset({"status"})
#: Length of the queue of connections. If the server hangs, or was killed and is held up by the
#: kernel, every client leaves one in it. Once it is full, nobody can find out who listens
#: (``peer_pid``). So it is as long as the kernel permits (somaxconn).
_QUEUE_LENGTH: Final = 1 << 16
#: A client that sends nothing, or does not read its reply, is disconnected.
IDLE_MAX_S: Final = 30.0
_REFUSED_S: Final = 1.0
#: asm-generic/socket.h: SO_PEERGROUPS (Linux 4.13), an array of gid_t.
_PEERGROUPS: Final = 59
#: Python's longest answer of getsockopt(2): 256 groups.
_GROUPS_MAX_BYTES: Final = 1024
_GROUP_MAX: Final = 2**32 - 2  # (gid_t)-1 means "leave it" to chown(2)
#: Waiting connections; more are refused by the kernel.
BACKLOG: Final = 64
#: Between two connections taken, so at most 100 a second: each costs the loop some 0.2 ms.
_PAUSE_S: Final = 0.01
#: No connection can be taken at the moment: too many open files, or no memory (accept(2)).
_SHORT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_SHORT_PAUSE_S: Final = 0.1


async def serve_control(
    path: str,
    verbs: Mapping[str, Verb],
    group: int | None = None,
    task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer *verbs* on the socket *path* until cancelled; ``started`` once it listens.

    Members of *group* may ask for what changes nothing. Raises SourceBusy if a living server has
    that socket, ServeFailed if it cannot be made.
    """
    server = _Server(verbs, group)
    with listening_at(path, 0o600 if group is None else 0o660, group) as listening:
        async with trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, server.serve, [_listener(listening)])
            task_status.started()


async def serve_connections(
    listening: socket.socket, converse: Conversation, *, most: int, deadline_s: float
) -> None:
    """Hand each connection to *listening* to *converse*, until cancelled.

    At most *most* at once, each for at most *deadline_s*. Nothing that a client does ends this.
    """
    listener = trio.socket.from_stdlib_socket(listening)
    scopes: dict[trio.CancelScope, None] = {}  # the oldest first

    async def handle(taken: trio.socket.SocketType, scope: trio.CancelScope) -> None:
        try:
            with scope:
                async with trio.SocketStream(taken) as stream:
                    await converse(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            _log.debug("a client hung up")
        except Exception:
            # The last handler: a bug here must not end the mount.
            _log.exception("a client was not answered")
        finally:
            scopes.pop(scope, None)

    async with trio.open_nursery() as nursery:
        while True:
            try:
                taken, _ = await listener.accept()
            except OSError as error:
                if error.errno in _SHORT:
                    _log.warning("a connection has to wait: %s", error.strerror)
                await trio.sleep(_SHORT_PAUSE_S)
                continue
            if len(scopes) >= most:
                oldest = next(iter(scopes))
                del scopes[oldest]
                oldest.cancel()
            scope = trio.move_on_after(deadline_s)
            scopes[scope] = None
            nursery.start_soon(handle, taken, scope)
            await trio.sleep(_PAUSE_S)


@contextlib.contextmanager
def listening_at(path: str, mode: int, group: int | None = None) -> Iterator[socket.socket]:
    """Yield a socket made by ``listen``; afterwards close it and remove its file."""
    with listen(path, mode, group) as listening:
        bound = os.stat(path)
        try:
            yield listening
        finally:
            _remove_own(path, bound)


def listen(path: str, mode: int = 0o600, group: int | None = None) -> socket.socket:
    """Return a listening socket at *path* with *mode* and *group*; a dead server's is replaced.

    Raises SourceBusy if the socket's server lives, ServeFailed if *path* cannot be used.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # bind(2) gives the file the socket's own mode less the umask (unix_bind_bsd in
        # net/unix/af_unix.c). So there is no moment in which other users could connect.
        os.fchmod(listening.fileno(), mode if group is None else 0o600)
        with locked_directory(os.path.dirname(path)):
            remove_stale(path)
            listening.bind(path)
            if group is not None:
                os.chown(path, -1, group)
            os.chmod(path, mode)
            listening.listen(_QUEUE_LENGTH)
    except OSError as error:
        listening.close()
        raise ServeFailed(f"socket {path}: {error.strerror or error}") from error
    except BaseException:
        listening.close()
        raise
    return listening


def _remove_own(path: str, bound: os.stat_result) -> None:
    """Remove the socket file that is *bound*, unless the next server has put its own there."""
    try:
        with locked_directory(os.path.dirname(path)):
            if os.path.samestat(os.stat(path), bound):
                os.unlink(path)
    except OSError as error:
        _log.warning("socket %s left behind: %s", path, error)


def _listener(listening: socket.socket) -> trio.SocketListener:
    return trio.SocketListener(trio.socket.from_stdlib_socket(listening))


class _Server:
    """Answers a bounded number of connections, each with bounded line length and time."""

    def __init__(self, verbs: Mapping[str, Verb], group: int | None) -> None:
        self._verbs = verbs
        self._for_guests = {do: verb for do, verb in verbs.items() if do in _FOR_GUESTS}
        self._group = group
        self._connections = self._guests = 0

    async def serve(self, stream: trio.SocketStream) -> None:
        is_guest = not _is_owner(stream)
        if self._connections >= CONNECTIONS_MAX or (is_guest and self._guests >= _GUESTS_MAX):
            await stream.aclose()
            return
        self._connections += 1
        self._guests += is_guest
        try:
            async with stream:
                await self._converse(stream, is_guest=is_guest)
        except (trio.BrokenResourceError, trio.TooSlowError):
            _log.debug("control connection dropped")
        finally:
            self._connections -= 1
            self._guests -= is_guest

    async def _converse(self, stream: trio.SocketStream, *, is_guest: bool) -> None:
        if is_guest and not _is_member(stream, self._group):
            await _send(stream, _refusal(NotRoot("the control socket is for root")))
            with trio.move_on_after(_REFUSED_S):  # closing on an unread request resets the reply
                await stream.receive_some(LINE_MAX_BYTES)
            return
        may = self._for_guests if is_guest else self._verbs
        received = bytearray()
        while True:
            end = received.find(b"\n")
            if end >= 0:
                line = bytes(received[:end])
                del received[: end + 1]
                await _send(stream, await self._answer(line, may))
                continue
            if len(received) > LINE_MAX_BYTES:
                await _send(stream, _refusal(UsageError("the request is too long")))
                return
            with trio.fail_after(IDLE_MAX_S):
                part = await stream.receive_some(LINE_MAX_BYTES)
            if not part:
                return
            received += part

    async def _answer(self, line: bytes, may: Mapping[str, Verb]) -> dict[str, Any]:
        try:
            verb, args = self._parse(line, may)
            return {"v": PROTOCOL_VERSION, "ok": True, "result": await verb(args)}
        except KvfsError as error:
            return _refusal(error)
        except Exception:  # the last handler: a bug of a verb must not end the mount
            _log.exception("control request failed")
            return _refusal(ServeFailed("the server failed on this request; see its log"))

    def _parse(self, line: bytes, may: Mapping[str, Verb]) -> tuple[Verb, dict[str, Any]]:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            raise UsageError("the request is not a line of JSON") from None
        if not isinstance(request, dict):
            raise UsageError("the request is not a JSON table")
        if request.get("v") != PROTOCOL_VERSION:
            raise UsageError(f"protocol version {request.get('v')!r} is not {PROTOCOL_VERSION}")
        do, args = request.get("do"), request.get("args", {})
        verb = self._verbs.get(do) if isinstance(do, str) else None
        if verb is None:
            raise UsageError(f"unknown request {do!r}; known: {', '.join(sorted(self._verbs))}")
        if do not in may:
            raise NotRoot(f"{do} is for root; the group of control_group may ask for the status")
        if not isinstance(args, dict):
            raise UsageError("args is not a JSON table")
        return verb, args


def peer_of(stream: trio.SocketStream) -> tuple[int, int, frozenset[int]]:
    """Return pid, uid and all groups of the process that connected; of very many one group."""
    raw = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEERCRED.size)
    pid, uid, gid = PEERCRED.unpack(raw)
    try:
        others = stream.socket.getsockopt(socket.SOL_SOCKET, _PEERGROUPS, _GROUPS_MAX_BYTES)
    except OSError:  # it is in more groups
        others = b""
    return pid, uid, frozenset((gid, *array("I", others)))


def _is_owner(stream: trio.SocketStream) -> bool:
    """Whether root or the server's own user connected."""
    return peer_of(stream)[1] in (0, os.geteuid())


def _is_member(stream: trio.SocketStream, group: int | None) -> bool:
    """Whether the process that connected was in *group*, as any of its groups; no if unknown."""
    return group is not None and group in peer_of(stream)[2]


def group_id(group: str) -> int | None:
    """Return the number of the setting control_group; None if there is none. Raises UsageError."""
    if not group:
        return None
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        if group.isascii() and group.isdecimal() and int(group) <= _GROUP_MAX:
            return int(group)
        raise UsageError(f"control_group: there is no group {group!r} on this machine") from None


def _refusal(error: KvfsError) -> dict[str, Any]:
    exit_code = error.exit_code if isinstance(error, CommandError) else CommandError.exit_code
    reason = str(error) or type(error).__name__
    return {"v": PROTOCOL_VERSION, "ok": False, "error": reason, "exit_code": exit_code}


async def _send(stream: trio.SocketStream, reply: dict[str, Any]) -> None:
    line = json.dumps(reply, separators=(",", ":"), default=repr)
    with trio.fail_after(IDLE_MAX_S):
        await stream.send_all(line.encode() + b"\n")
