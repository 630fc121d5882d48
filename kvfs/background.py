"""One thread for work that must not wait on the hot path: prepare, unlink, identify.

Jobs run in the order they came. Identities are held back for a moment, so that a block that is
closed and then renamed is identified once. A job's failure is logged and counted, never raised.
"""

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final

from kvfs.types import InodeNo

_log: Final = logging.getLogger(__name__)
#: A rename follows a close within this time; waiting longer only delays what a power loss keeps.
_IDENTIFY_DELAY_S: Final = 0.02
#: More identities than this are written at once, however young.
_IDENTIFY_BATCH: Final = 512

Job = Callable[[], None]


class Background:
    """The thread and its queue of at most *jobs_max* jobs."""

    def __init__(self, jobs_max: int) -> None:
        self._jobs_max = jobs_max
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._identities: dict[InodeNo, Job] = {}
        self._idle = threading.Event()
        self._idle.set()
        self.failures = 0
        self._thread = threading.Thread(target=self._work, name="kvfs-background", daemon=True)
        self._thread.start()

    @property
    def backlog(self) -> int:
        """Jobs not yet started."""
        return self._jobs.qsize() + len(self._identities)

    def submit(self, job: Job) -> None:
        """Queue *job*; above the bound the caller does the work itself, which slows it down."""
        if self._jobs.qsize() >= self._jobs_max:
            self._run(job)
        else:
            self._jobs.put(job)

    def identify(self, ino: InodeNo, job: Job) -> None:
        """Queue *job*, which writes the identity of *ino*; a later one replaces it."""
        first = not self._identities
        self._identities[ino] = job
        if first or len(self._identities) >= _IDENTIFY_BATCH:
            self._jobs.put(_wake)

    def forget(self, ino: InodeNo) -> None:
        """Drop the pending identity of *ino*, which is going away."""
        self._identities.pop(ino, None)

    def drain(self) -> None:
        """Wait until all that was queued before is done, identities included."""
        done = threading.Event()

        def finish() -> None:
            self._write_identities()
            done.set()

        self._jobs.put(finish)
        done.wait()

    def stop(self) -> None:
        """Do what is queued and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_IDENTIFY_DELAY_S if self._identities else None)
            except Empty:
                self._write_identities()
                continue
            if job is None:
                self._write_identities()
                return
            self._run(job)
            if len(self._identities) >= _IDENTIFY_BATCH:
                self._write_identities()

    def _write_identities(self) -> None:
        while self._identities:
            try:
                _, job = self._identities.popitem()
            except KeyError:  # the loop's thread took the last one back (forget)
                return
            self._run(job)

    def _run(self, job: Job) -> None:
        try:
            job()
        except Exception:
            self.failures += 1
            _log.exception("background work failed")


def _wake() -> None:
    """Do nothing: being run makes the thread look at its identities."""
