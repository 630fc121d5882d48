"""Threads of a test that use a mount at the same time, until the test has seen enough."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from tests.support.clients.stepping import until


class Worker(threading.Thread):
    """Does its ``work`` again and again until it ``ends``; keeps what went wrong."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.ends = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Work until the end, or a failure."""
        try:
            while not self.ends.is_set():
                self.work()
        except BaseException as error:  # a failed assertion too; ``at_work`` raises it
            self.failure = error

    def work(self) -> None:
        """Do one round."""
        raise NotImplementedError


WorkerT = TypeVar("WorkerT", bound=Worker)


@contextlib.contextmanager
def at_work(workers: Sequence[Worker]) -> Iterator[None]:
    """Inside the ``with`` all *workers* work; its end raises what one of them found wrong."""
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        for worker in workers:
            worker.ends.set()
        for worker in workers:
            worker.join()
    for worker in workers:
        if worker.failure is not None:
            raise worker.failure


def all_go_on(workers: Sequence[WorkerT], done: Callable[[WorkerT], int], more: int) -> None:
    """Wait until what each has *done* has grown by *more* since, or one has failed."""
    before = [done(worker) for worker in workers]
    until(
        lambda: all(
            worker.failure is not None or done(worker) >= then + more
            for worker, then in zip(workers, before, strict=True)
        ),
        "all have gone on",
    )
