"""Drives a trace through one directory by client processes, and counts what happened.

Prompts go to the clients in the order of the trace, each to the first client that is free. A hit is
a block of a prefix that was there: a chain of blocks is useful up to its first missing one.
"""

import select
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Self

from kvfs.bench.crew import Workers, hear, tell
from kvfs.bench.replay.trace import Request

_CLIENT = "kvfs.bench.replay.client"


class ServedPrompt(NamedTuple):
    """One prompt that was served, with what its time to the first token follows from.

    *waited_ns* is the time in lookups and loads before the model could begin.
    """

    tokens: int
    hits: int
    waited_ns: int


@dataclass
class ReplayCounts:
    """What happened to the blocks of all prompts so far; times of system calls in ns."""

    #: Blocks asked for.
    asked: int = 0
    #: Of these found and loaded, as part of a prefix.
    hits: int = 0
    #: Found behind the first missing block, where they help nobody.
    present: int = 0
    #: Stored, and refused for lack of space.
    stored: int = 0
    refused: int = 0
    #: Prefixes cut short because a block went between its lookup and its load.
    lost: int = 0
    loads_ns: list[int] = field(default_factory=list)
    stores_ns: list[int] = field(default_factory=list)
    prompts: list[ServedPrompt] = field(default_factory=list)
    #: CPU time of the clients in system calls, without making and checking contents.
    clients_cpu_ns: int = 0

    def add(self, request: Request, reply: dict[str, Any]) -> None:
        """Count what a client did for *request*."""
        self.asked += len(request.blocks)
        self.hits += reply["hits"]
        self.present += reply["present"]
        self.refused += reply["refused"]
        self.lost += reply["lost"]
        self.stored += len(reply["stores_ns"])
        self.loads_ns += reply["loads_ns"]
        self.stores_ns += reply["stores_ns"]
        self.clients_cpu_ns += reply["cpu_ns"]
        waited_ns = reply["lookups_ns"] + sum(reply["loads_ns"])
        self.prompts.append(ServedPrompt(request.tokens, reply["hits"], waited_ns))

    @property
    def hit_rate(self) -> float:
        """Hits of all blocks asked for, 0 to 1."""
        return self.hits / self.asked if self.asked else 0.0


class Driver:
    """Client processes that serve prompts from *directory*, with blocks of *block_bytes*.

    *flags* are added to every open(2). Leaving the ``with`` ends the clients.
    """

    def __init__(
        self, directory: str, block_bytes: int, *, clients: int = 1, flags: int = 0
    ) -> None:
        self.directory = directory
        self.tally = ReplayCounts()
        self._workers = Workers(clients, _CLIENT, str(block_bytes), str(flags))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._workers.__exit__(kind, error, traceback)

    def run(
        self,
        requests: Sequence[Request],
        *,
        speed: float | None = None,
        before_each: Callable[[Request], None] = lambda _: None,
    ) -> None:
        """Serve all *requests*, at *speed* seconds of the trace a second; None: without waiting.

        Raises ``VerifyFailed`` for a wrong byte, ``BenchFailed`` if a system call failed; the
        clients cannot be used after that.
        """
        free = list(self._workers.processes)
        busy: dict[int, tuple[subprocess.Popen[bytes], Request]] = {}
        begun_s = time.monotonic()
        for request in requests:
            if speed is not None:
                due_s = begun_s + (request.at_s - requests[0].at_s) / speed
                time.sleep(max(0.0, due_s - time.monotonic()))
            if not free:
                free = self._finished(busy)
            before_each(request)
            client = free.pop()
            tell(client, {"directory": self.directory, "blocks": request.blocks})
            assert client.stdout is not None
            busy[client.stdout.fileno()] = client, request
        while busy:
            self._finished(busy)

    def _finished(
        self, busy: dict[int, tuple[subprocess.Popen[bytes], Request]]
    ) -> list[subprocess.Popen[bytes]]:
        """Wait for an answer; count each that is there, and return the clients that are free."""
        answered, _, _ = select.select(list(busy), [], [])
        free = []
        for fd in answered:
            client, request = busy.pop(fd)
            self.tally.add(request, hear(client, f"replay in {self.directory}"))
            free.append(client)
        return free
