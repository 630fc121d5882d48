"""The worker processes of a benchmark: started once, released together, timed as one."""

import contextlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

from kvfs.client.subprocesses import program_again
from kvfs.core.errors import BenchFailed, VerifyFailed


class WorkOrder(NamedTuple):
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


class Workers:
    """Processes of one program that take a JSON line on stdin for each task and answer with one.

    Leaving the ``with`` kills them.
    """

    def __init__(
        self, count: int, program: str, *arguments: str, pass_fds: Sequence[int] = ()
    ) -> None:
        command, environment = program_again(program)
        self.processes = [
            subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=pass_fds,
                env=environment,
                # So that Ctrl-C does not reach them: they end when their stdin ends.
                start_new_session=True,
            )
            for _ in range(count)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for worker in self.processes:
            worker.kill()
        for worker in self.processes:
            worker.communicate()


def tell(worker: subprocess.Popen[bytes], order: Mapping[str, Any]) -> None:
    """Give *worker* an order. If it is dead, only ``hear`` finds out."""
    assert worker.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        worker.stdin.write(json.dumps(order).encode() + b"\n")
        worker.stdin.flush()


def hear(worker: subprocess.Popen[bytes], doing: str) -> dict[str, Any]:
    """Wait for an answer of *worker* and return it; *doing* names the work in an error.

    Raises ``BenchFailed`` when a system call failed or the worker died, and ``VerifyFailed`` when
    a load got wrong bytes.
    """
    assert worker.stdout is not None
    line = worker.stdout.readline()
    reply: dict[str, Any] = json.loads(line) if line else {"failed": "the worker died"}
    if "wrong" in reply:
        raise VerifyFailed(f"{doing}: {reply['wrong']}")
    if "failed" in reply:
        raise BenchFailed(f"{doing}: {reply['failed']}")
    return reply


class Crew(Workers):
    """As many workers as the job with the most threads needs.

    All workers wait at one pipe, the gate. Writing one byte for each worker opens it for all of
    them at once.
    """

    def __init__(self, threads: int, buffer_bytes: int, program: str = "kvfs.bench.worker") -> None:
        self._gate_read_fd, self._gate_write_fd = os.pipe()
        gate = self._gate_read_fd
        super().__init__(threads, program, str(gate), str(buffer_bytes), pass_fds=[gate])

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        os.close(self._gate_read_fd)
        os.close(self._gate_write_fd)

    def run(self, order: WorkOrder) -> float:
        """Do *order*; return the seconds from the first worker's start to the last one's end.

        Raises what ``replies`` raises.
        """
        return wall_s(self.replies(order))

    def replies(self, order: WorkOrder) -> list[dict[str, Any]]:
        """Do *order*; return each worker's reply.

        Raises ``BenchFailed`` when a system call fails or a load gets wrong bytes; the crew cannot
        be used after that.
        """
        workers, doing = self.processes[: order.threads], f"{order.do} in {order.directory}"
        share = order.blocks // order.threads
        for index, worker in enumerate(workers):
            tell(worker, {**order._asdict(), "first": index * share, "blocks": share})
        for worker in workers:
            hear(worker, doing)
        os.write(self._gate_write_fd, b"." * len(workers))
        return [hear(worker, doing) for worker in workers]
