"""Gives the metrics out: to scrapes over HTTP, and as a file for node_exporter.

A Unix socket answers scrapes, and a loopback port if one is set. Metrics hold counts, paths and the
names of programs, but no block data. So every user of the host may read them by default, and a
request is bounded in size and time.

The file for node_exporter's textfile collector is written at an interval. It is replaced by a
rename, so that a reader finds a whole one. A thread writes it, because its file system may be slow,
hang (NFS), or be this mount, whose requests only this event loop can answer.
"""

import contextlib
import errno
import functools
import logging
import os
import socket
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Final

import trio

from kvfs.core.errors import CommandError
from kvfs.core.mount_name import metrics_path
from kvfs.core.settings import Settings
from mount.control.metrics.exposition import Exposition
from mount.control.socket import BACKLOG, listening_at, serve_connections

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
#: How long a stop waits for the removal, if the file system hangs.
_REMOVAL_MAX_S: Final = 1.0


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
        drop_in = "; the unit needs a drop-in for it: docs/metrics.md"
        hint = drop_in if error.errno == errno.EAFNOSUPPORT else ""
        raise OSError(f"metrics_port {settings.metrics_port}: {error.strerror}{hint}") from None
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


async def write_textfile(settings: Settings, exposition: Exposition) -> None:
    """Write the file that *settings* name until cancelled, and remove it in the end.

    Otherwise it would go on showing a mount that is gone.
    """
    if not settings.metrics_textfile:
        return
    written = _Textfile(settings.metrics_textfile)
    try:
        while True:
            try:
                text, _ = await exposition.text()
                await _in_thread(functools.partial(written.replace, text))
            except OSError as error:
                _log.warning("metrics not written: %s: %s", written.path, error.strerror)
            except Exception:
                # The last handler: a bug here must not end the mount.
                _log.exception("metrics not written")
            await trio.sleep(settings.metrics_textfile_s)
    finally:
        with trio.move_on_after(_REMOVAL_MAX_S, shield=True):
            await _in_thread(written.remove)


async def _in_thread(work: Callable[[], None]) -> None:
    await trio.to_thread.run_sync(work, abandon_on_cancel=True)


class _Textfile:
    """The file at ``path``, and the one that takes its place next."""

    def __init__(self, path: str) -> None:
        self.path = path
        # node_exporter reads names that end in .prom only.
        self._next = f"{path}.{os.getpid()}.new"

    def replace(self, text: bytes) -> None:
        """Put a file with *text* in its place, readable for all. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._next)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            with open(os.open(self._next, flags, 0o644), "wb") as file:
                os.fchmod(file.fileno(), 0o644)
                file.write(text)
            os.rename(self._next, self.path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(self._next)
            raise

    def remove(self) -> None:
        """Remove the file."""
        for path in (self.path, self._next):
            with contextlib.suppress(OSError):
                os.unlink(path)
