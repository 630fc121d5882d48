"""One job at a time in a thread of its own; its result is polled."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

R = TypeVar("R")


class Aside(Generic[R]):
    """At most one job; it may take seconds, and nobody waits for it but ``join``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._results: list[R] = []

    @property
    def busy(self) -> bool:
        """Whether a job runs, or its result was not fetched."""
        return self._thread is not None

    def start(self, job: Callable[[], R]) -> None:
        """Run *job*, which must not raise; not while ``busy``."""
        assert self._thread is None, "one at a time"

        def work() -> None:
            self._results.append(job())

        self._thread = threading.Thread(target=work, name=self._name, daemon=True)
        self._thread.start()

    def take(self) -> R | None:
        """Return the result of the job that has ended, once; None if there is none."""
        if not self._results:
            return None
        self.join()
        return self._results.pop()

    def join(self) -> None:
        """Wait for the job under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
