"""The control socket of a running server: JSON lines for root and for the server's own user.

``{"v": 1, "do": VERB, "args": {...}}`` is answered ``{"v": 1, "ok": true, "result": {...}}`` or
``{"v": 1, "ok": false, "error": TEXT, "exit_code": N}``. Nothing that a client sends may end the
server. The verbs are in verbs.py.
"""

import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
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

Verb = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]

#: For operators and one exporter; more connections mean that a client leaks them.
CONNECTIONS_MAX: Final = 16
#: Length of the queue of connections. If the server hangs, or was killed and is held up by the
#: kernel, every client leaves one in it. Once it is full, nobody can find out who listens
#: (``peer_pid``). So it is as long as the kernel permits (somaxconn).
_WAITING_MAX: Final = 1 << 16
#: A client that sends nothing, or does not read its reply, is disconnected.
IDLE_MAX_S: Final = 30.0

_log: Final = logging.getLogger(__name__)


async def serve_control(
    path: str,
    verbs: Mapping[str, Verb],
    task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer *verbs* on the socket *path* until cancelled; ``started`` once it listens.

    Raises SourceBusy if a living server has that socket, ServeFailed if it cannot be made.
    """
    listening = listen(path)
    bound = os.stat(path)
    server = _Server(verbs)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, server.serve, [_listener(listening)])
            task_status.started()
    finally:
        remove_own(path, bound)
        listening.close()


def listen(path: str, mode: int = 0o600) -> socket.socket:
    """Return a listening socket at *path* with *mode*; a dead server's socket is replaced.

    Raises SourceBusy if the socket's server lives, ServeFailed if *path* cannot be used.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # bind(2) gives the file the socket's own mode less the umask (unix_bind_bsd in
        # net/unix/af_unix.c). So there is no moment in which other users could connect.
        os.fchmod(listening.fileno(), mode)
        with locked_directory(os.path.dirname(path)):
            remove_stale(path)
            listening.bind(path)
            os.chmod(path, mode)
            listening.listen(_WAITING_MAX)
    except OSError as error:
        listening.close()
        raise ServeFailed(f"socket {path}: {error.strerror or error}") from error
    except BaseException:
        listening.close()
        raise
    return listening


def remove_own(path: str, bound: os.stat_result) -> None:
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

    def __init__(self, verbs: Mapping[str, Verb]) -> None:
        self._verbs = verbs
        self._connections = 0

    async def serve(self, stream: trio.SocketStream) -> None:
        if self._connections >= CONNECTIONS_MAX:
            await stream.aclose()
            return
        self._connections += 1
        try:
            async with stream:
                await self._converse(stream)
        except (trio.BrokenResourceError, trio.TooSlowError):
            _log.debug("control connection dropped")
        finally:
            self._connections -= 1

    async def _converse(self, stream: trio.SocketStream) -> None:
        if not _peer_allowed(stream):
            await _send(stream, _refusal(NotRoot("the control socket is for root")))
            return
        received = bytearray()
        while True:
            end = received.find(b"\n")
            if end >= 0:
                line = bytes(received[:end])
                del received[: end + 1]
                await _send(stream, await self._answer(line))
                continue
            if len(received) > LINE_MAX_BYTES:
                await _send(stream, _refusal(UsageError("the request is too long")))
                return
            with trio.fail_after(IDLE_MAX_S):
                part = await stream.receive_some(LINE_MAX_BYTES)
            if not part:
                return
            received += part

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            verb, args = self._parse(line)
            return {"v": PROTOCOL_VERSION, "ok": True, "result": await verb(args)}
        except KvfsError as error:
            return _refusal(error)
        except Exception:  # the last handler: a bug of a verb must not end the mount
            _log.exception("control request failed")
            return _refusal(ServeFailed("the server failed on this request; see its log"))

    def _parse(self, line: bytes) -> tuple[Verb, dict[str, Any]]:
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
        if not isinstance(args, dict):
            raise UsageError("args is not a JSON table")
        return verb, args


def _peer_allowed(stream: trio.SocketStream) -> bool:
    raw = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEERCRED.size)
    _pid, uid, _gid = PEERCRED.unpack(raw)
    return uid in (0, os.geteuid())


def _refusal(error: KvfsError) -> dict[str, Any]:
    exit_code = error.exit_code if isinstance(error, CommandError) else CommandError.exit_code
    reason = str(error) or type(error).__name__
    return {"v": PROTOCOL_VERSION, "ok": False, "error": reason, "exit_code": exit_code}


async def _send(stream: trio.SocketStream, reply: dict[str, Any]) -> None:
    line = json.dumps(reply, separators=(",", ":"), default=repr)
    with trio.fail_after(IDLE_MAX_S):
        await stream.send_all(line.encode() + b"\n")
