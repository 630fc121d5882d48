"""The stream of events: a line of JSON for each, to every client of the events socket.

Each client has a queue that is bounded in bytes. One that reads too slowly loses the oldest lines
and is told how many. One that reads nothing is cut off. The mount waits for none of them.
"""

import contextlib
import json
import logging
import math
from collections import deque
from typing import Any, Final

import trio

from kvfs.core.errors import CommandError
from kvfs.core.mount_name import events_path
from kvfs.core.settings import Settings
from kvfs.pool.figures.events import Events
from mount.control.socket import listening_at, serve_connections

_log: Final = logging.getLogger(__name__)

#: The number of the format (docs/events.md).
FORMAT: Final = 1
LISTENERS_MAX: Final = 16
#: How often new events go out. Between two of these they gather, so that a send carries many.
_INTERVAL_S: Final = 0.05
#: Events turned into text without a pause; each takes some 5 us.
_SLICE: Final = 64
#: The most that may wait for one client. A line takes some 200 bytes, and clients share it.
BACKLOG_MAX_BYTES: Final = 4 << 20
#: A client that takes nothing for this long is cut off.
_STALLED_MAX_S: Final = 60.0
#: After this time without an event a line is sent, to show that the stream lives and to find dead
#: clients.
_QUIET_MAX_S: Final = 30.0


async def serve_events(settings: Settings, events: Events, group: int | None) -> None:
    """Send the events of the mount with *settings* until cancelled; the socket is *group*'s.

    If the socket cannot be made that is logged, and the mount serves without it.
    """
    broadcast = Broadcast(settings, events)
    try:
        path, mode = events_path(settings.name), settings.events_socket_mode
        with listening_at(path, mode, group) as listening:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(broadcast.run)
                await serve_connections(
                    listening, broadcast.follow, most=LISTENERS_MAX, deadline_s=math.inf
                )
    except (OSError, CommandError) as error:
        _log.error("no events: %s", error)


class _Client:
    """The lines that one client has not been sent yet."""

    def __init__(self) -> None:
        self.waiting: deque[list[bytes]] = deque()
        self._held_bytes = 0
        self.lost = 0
        self.has_some = trio.Event()

    def offer(self, lines: list[bytes], lost: int) -> None:
        """Append *lines*, after *lost* ones that are missing; drop the oldest beyond the bound."""
        self.waiting.append(lines)
        self._held_bytes += _size_bytes(lines)
        self.lost += lost
        while self._held_bytes > BACKLOG_MAX_BYTES:
            dropped = self.waiting.popleft()
            self._held_bytes -= _size_bytes(dropped)
            self.lost += len(dropped)
        self.has_some.set()

    def pop_lines(self) -> bytes:
        """Return the oldest lines, after one that says how many were lost before them."""
        told = _said("lost", count=self.lost) if self.lost else b""
        self.lost = 0
        if self.waiting:
            lines = self.waiting.popleft()
            self._held_bytes -= _size_bytes(lines)
            told += b"".join(lines)
        if not self.waiting:
            self.has_some = trio.Event()
        return told


class Broadcast:
    """Takes the events of one pool, as long as there is a client, and gives them to all."""

    def __init__(self, settings: Settings, events: Events) -> None:
        self._settings = settings
        self._events = events
        self._clients: set[_Client] = set()
        self._has_clients = trio.Event()

    async def run(self) -> None:
        """Pass events on until cancelled."""
        while True:
            await self._has_clients.wait()
            while self._clients:
                # All that is waiting now, in slices; what comes meanwhile waits for the next round.
                while True:
                    lines, lost = self._events.pop(_SLICE), self._events.take_lost()
                    if not lines and not lost:
                        break
                    for client in self._clients:
                        client.offer(lines, lost)
                    await trio.lowlevel.checkpoint()
                await trio.sleep(_INTERVAL_S)

    async def follow(self, stream: trio.SocketStream) -> None:
        """Send all further events to one client until it goes."""
        client = _Client()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch_end, stream, nursery.cancel_scope)
            self._enter(client)
            try:
                await self._send(stream, client)
            except trio.BrokenResourceError:
                _log.debug("a listener hung up")
            finally:
                self._leave(client)
                nursery.cancel_scope.cancel()

    async def _send(self, stream: trio.SocketStream, client: _Client) -> None:
        settings = self._settings
        told = _said("hello", format=FORMAT, mountpoint=settings.mountpoint, name=settings.name)
        while True:
            with trio.move_on_after(_STALLED_MAX_S) as stalled:
                await stream.send_all(told)
            if stalled.cancelled_caught:
                return
            with trio.move_on_after(_QUIET_MAX_S):
                await client.has_some.wait()
            told = client.pop_lines() or _said("quiet")

    def _enter(self, client: _Client) -> None:
        self._clients.add(client)
        self._events.listen(wanted=True)
        self._has_clients.set()

    def _leave(self, client: _Client) -> None:
        self._clients.discard(client)
        if not self._clients:
            self._events.listen(wanted=False)
            self._has_clients = trio.Event()


async def _watch_end(stream: trio.SocketStream, scope: trio.CancelScope) -> None:
    """Cancel *scope* when the client hangs up; what it sends is ignored."""
    with contextlib.suppress(trio.BrokenResourceError):
        while await stream.receive_some(4096):
            pass
    scope.cancel()


def _size_bytes(lines: list[bytes]) -> int:
    return sum(map(len, lines))


def _said(event: str, **more: Any) -> bytes:  # noqa: ANN401
    return json.dumps({"event": event, **more}, separators=(",", ":")).encode() + b"\n"
