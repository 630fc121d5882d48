"""Answers scrapes: plain HTTP on a Unix socket, and on a loopback port if one is set.

Metrics hold counts, paths and the names of programs, but no block data. So every user of the host
may read them by default, and a request is bounded in size and time.
"""

import contextlib
import functools
import logging
import socket
from collections.abc import Iterator
from http import HTTPStatus
from typing import Final

import trio

from kvfs.core.errors import CommandError
from kvfs.core.mount_name import metrics_path
from kvfs.core.settings import Settings
from mount.control.connections import BACKLOG, serve_connections
from mount.control.metrics.exposition import Exposition
from mount.control.socket import listening_at

_log: Final = logging.getLogger(__name__)

#: A request's line and headers; those of Prometheus take 400 bytes.
REQUEST_MAX_BYTES: Final = 8 << 10
SCRAPES_MAX: Final = 16
#: For a whole scrape. Prometheus gives up after 10 s by default.
DEADLINE_S: Final = 10.0
LOOPBACK: Final = "127.0.0.1"
#: The path that Prometheus asks for by default.
_PATH: Final = "/metrics"
_HEAD_END: Final = b"\r\n\r\n"


async def serve_scrapes(settings: Settings, exposition: Exposition, group: int | None) -> None:
    """Answer scrapes of the mount with *settings* until cancelled; the socket is *group*'s.

    If a socket cannot be made that is logged, and the mount serves without it.
    """
    scrapes = Scrapes(exposition)
    async with trio.open_nursery() as nursery:
        with contextlib.ExitStack() as stack:
            path = metrics_path(settings.name)
            for opened in (
                listening_at(path, settings.metrics_socket_mode, group),
                _on_port(settings),
            ):
                try:
                    listening = stack.enter_context(opened)
                except (OSError, CommandError) as error:
                    _log.error("no metrics here: %s", error)
                    continue
                if listening is not None:
                    nursery.start_soon(
                        functools.partial(
                            serve_connections,
                            listening,
                            scrapes.answer,
                            most=SCRAPES_MAX,
                            deadline_s=DEADLINE_S,
                        )
                    )
            await trio.sleep_forever()


@contextlib.contextmanager
def _on_port(settings: Settings) -> Iterator[socket.socket | None]:
    if settings.metrics_port is None:
        yield None
        return
    try:
        listening = socket.create_server((LOOPBACK, settings.metrics_port), backlog=BACKLOG)
    except OSError as error:
        raise OSError(f"metrics_port {settings.metrics_port}: {error.strerror}") from None
    with listening:
        yield listening


class Scrapes:
    """Answers one request per connection."""

    def __init__(self, exposition: Exposition) -> None:
        self._exposition = exposition

    async def answer(self, stream: trio.SocketStream) -> None:
        """Read one request and answer it."""
        head = await _head(stream)
        if head is None:
            return
        method, _, rest = head.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        content_type = "text/plain; charset=utf-8"
        if len(head) > REQUEST_MAX_BYTES:
            status, body = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, b""
        elif method not in ("GET", "HEAD"):
            status, body = HTTPStatus.METHOD_NOT_ALLOWED, b""
        elif path != _PATH:
            status, body = HTTPStatus.NOT_FOUND, f"see {_PATH}\n".encode()
        else:
            status = HTTPStatus.OK
            body, content_type = await self._exposition.text(_accepted(head))
        answer = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        ).encode()
        await stream.send_all(answer if method == "HEAD" else answer + body)
        await stream.send_eof()


async def _head(stream: trio.SocketStream) -> str | None:
    """Return the line and the headers of a request; None if the client ends before.

    If they are longer than REQUEST_MAX_BYTES, so is what is returned.
    """
    received = bytearray()
    while _HEAD_END not in received and len(received) <= REQUEST_MAX_BYTES:
        part = await stream.receive_some(REQUEST_MAX_BYTES)
        if not part:
            return None
        received += part
    return received.partition(_HEAD_END)[0].decode("latin-1")


def _accepted(head: str) -> str:
    """Return the value of the header Accept."""
    for line in head.split("\r\n")[1:]:
        name, _, value = line.partition(":")
        if name.strip().lower() == "accept":
            return value.strip()
    return ""
