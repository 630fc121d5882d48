"""Connections that anybody on the host may open: bounded in number, in rate and in time.

A client that sends nothing, reads nothing or connects in a loop costs the mount next to nothing,
and keeps no other client away: beyond the bound the oldest connection is cut off.
"""

import errno
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Final

import trio

_log: Final = logging.getLogger(__name__)

#: Waiting connections; more are refused by the kernel.
BACKLOG: Final = 64
#: Between two connections taken, so at most 100 a second: each costs the loop some 0.2 ms.
_PAUSE_S: Final = 0.01
#: No connection can be taken at the moment: too many open files, or no memory (accept(2)).
_SHORT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_SHORT_PAUSE_S: Final = 0.1

Conversation = Callable[[trio.SocketStream], Awaitable[None]]


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
