"""The worker processes of a benchmark: started once, released together, timed as one."""

import json
import os
import subprocess
from types import TracebackType
from typing import Any, NamedTuple, Self

from kvfs.client.subprocesses import program_again
from kvfs.core.errors import BenchFailed


class Order(NamedTuple):
    """What all workers do together; *blocks* are divided evenly among *threads*."""

    do: str
    directory: str
    salt: str
    blocks: int
    size_bytes: int
    threads: int
    passes: int = 1
    direct: bool = False


def wall_s(replies: list[dict[str, Any]]) -> float:
    """Return the seconds from the first worker's start to the last one's end."""
    return float(max(r["end_ns"] for r in replies) - min(r["start_ns"] for r in replies)) / 1e9


class Crew:
    """As many workers as the job with the most threads needs.

    All workers wait at one pipe, the gate. Writing one byte for each worker opens it for all of
    them at once.
    """

    def __init__(self, threads: int, buffer_bytes: int, program: str = "kvfs.bench.worker") -> None:
        self._gate_read_fd, self._gate_write_fd = os.pipe()
        command, environment = program_again(program)
        self._workers = [
            subprocess.Popen(
                [*command, str(self._gate_read_fd), str(buffer_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[self._gate_read_fd],
                env=environment,
                # So that Ctrl-C does not reach them: they end when their stdin ends.
                start_new_session=True,
            )
            for _ in range(threads)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.communicate()
        os.close(self._gate_read_fd)
        os.close(self._gate_write_fd)

    def run(self, order: Order) -> float:
        """Do *order*; return the seconds from the first worker's start to the last one's end.

        Raises what ``replies`` raises.
        """
        return wall_s(self.replies(order))

    def replies(self, order: Order) -> list[dict[str, Any]]:
        """Do *order*; return each worker's reply.

        Raises ``BenchFailed`` when a system call fails or a load gets wrong bytes; the crew cannot
        be used after that.
        """
        workers = self._workers[: order.threads]
        share = order.blocks // order.threads
        for index, worker in enumerate(workers):
            self._tell(worker, {**order._asdict(), "first": index * share, "blocks": share})
        for worker in workers:
            self._hear(worker, order)
        os.write(self._gate_write_fd, b"." * len(workers))
        return [self._hear(worker, order) for worker in workers]

    def _tell(self, worker: subprocess.Popen[bytes], order: dict[str, Any]) -> None:
        assert worker.stdin is not None
        worker.stdin.write(json.dumps(order).encode() + b"\n")
        worker.stdin.flush()

    def _hear(self, worker: subprocess.Popen[bytes], order: Order) -> dict[str, Any]:
        assert worker.stdout is not None
        line = worker.stdout.readline()
        reply: dict[str, Any] = json.loads(line) if line else {"failed": "the worker died"}
        if "failed" in reply:
            raise BenchFailed(f"{order.do} in {order.directory}: {reply['failed']}")
        return reply
