"""The hints socket: engines and routers say which blocks are worth keeping, a batch a line.

No client of the mount waits for hints: they are taken in small steps, with pauses, one batch at a
time. So they never take more than a tenth of the loop's time, and who sends more waits in its own
send(2). An answer comes only to a batch that has an ``id``.
"""

import json
import logging
import math
import time
from typing import Final

import trio

from kvfs.client.control_socket import LINE_MAX_BYTES
from kvfs.core.errors import CommandError
from kvfs.core.hints import HintClient, TakenHints, batch_of
from kvfs.core.mount_name import hints_path
from kvfs.core.settings import Settings
from kvfs.engine.store import Store
from mount.control.socket import IDLE_MAX_S, listening_at, peer_of, serve_connections

_log: Final = logging.getLogger(__name__)

CLIENTS_MAX: Final = 64
#: A step is followed by a pause of so many times its length.
_PAUSES: Final = 9


async def serve_hints(settings: Settings, store: Store, group: int | None) -> None:
    """Take hints for the mount with *settings* until cancelled; the socket is *group*'s.

    If the socket cannot be made that is logged, and the mount serves without it.
    """
    taker = _Taker(store)
    try:
        path, mode = hints_path(settings.name), settings.hints_socket_mode
        with listening_at(path, mode, group) as listening:
            await serve_connections(
                listening, taker.converse, most=CLIENTS_MAX, deadline_s=math.inf
            )
    except (OSError, CommandError) as error:
        _log.error("no hints: %s", error)


class _Taker:
    """Takes the lines of all clients, one at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turn = trio.Lock()

    async def converse(self, stream: trio.SocketStream) -> None:
        """Take the lines of one client until it goes, or sends one that is too long."""
        _pid, uid, gids = peer_of(stream)
        client = HintClient(uid, gids)
        received = bytearray()
        while True:
            end = received.find(b"\n")
            if end < 0:
                if len(received) > LINE_MAX_BYTES:
                    return
                part = await stream.receive_some(LINE_MAX_BYTES)
                if not part:
                    return
                received += part
                continue
            line = bytes(received[:end])
            del received[: end + 1]
            answer = await self._carry_out(line, client)
            if answer is not None:
                with trio.move_on_after(IDLE_MAX_S) as unread:
                    await stream.send_all(answer)
                if unread.cancelled_caught:
                    return

    async def _carry_out(self, line: bytes, client: HintClient) -> bytes | None:
        """Do what *line* says; return the answer, if it asks for one."""
        done = TakenHints()
        async with self._turn:
            began_s = time.monotonic()
            batch = batch_of(line)
            for _ in self._store.take_hints.carry_out(batch, client, done):
                await self._rest(began_s)
                if self._store.device_watch.lost:
                    return None
                began_s = time.monotonic()
            await self._rest(began_s)
        if batch.id is None:
            return None
        return json.dumps({"id": batch.id, **vars(done)}).encode() + b"\n"

    async def _rest(self, began_s: float) -> None:
        await trio.sleep(_PAUSES * (time.monotonic() - began_s))
