"""Work that must not wait on the hot path: prepare, unlink, identify.

Short jobs run on the loop's own thread whenever no request waits: a thread beside the loop would
cost more in hand-overs of the interpreter lock than the jobs themselves (twenty a store). Long
ones, such as the unlink of a large extent, go to a thread. A job's failure is logged and
counted, never raised.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final

from kvfs.core.errors import NoSpace
from kvfs.core.types import InodeNo

_log: Final = logging.getLogger(__name__)

Job = Callable[[], None]


class Background:
    """Queues of jobs: at most *jobs_max* short ones, identities, and one thread for long ones."""

    def __init__(self, jobs_max: int) -> None:
        self._jobs_max = jobs_max
        self._jobs: deque[Job] = deque()
        #: Identities queued since the last tick; those before it are due.
        self._fresh: dict[InodeNo, Job] = {}
        self._due: dict[InodeNo, Job] = {}
        self._leisure: deque[Job] = deque()
        #: Of those, what was refused since the last tick, and what the log tells of already.
        self._put_off: list[Job] = []
        self._told: set[Job] = set()
        self._long: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.failures = 0

    @property
    def backlog(self) -> int:
        """Jobs not yet done."""
        queued = len(self._jobs) + len(self._fresh) + len(self._due) + len(self._leisure)
        return queued + len(self._put_off) + self._long.qsize()

    def do(self, job: Job) -> None:
        """Do *job* at once, on the caller's thread; a failure is logged and counted."""
        try:
            job()
        except Exception:
            self.failures += 1
            _log.exception("background work failed")

    def submit(self, job: Job) -> None:
        """Queue a short *job*; above the bound the caller does one itself, which slows it down."""
        self._jobs.append(job)
        if len(self._jobs) > self._jobs_max:
            self.do(self._jobs.popleft())

    def hand_over(self, job: Job) -> None:
        """Queue a short *job* from the thread: the loop does it, never the caller."""
        self._jobs.append(job)

    def submit_leisure(self, job: Job) -> None:
        """Queue a short *job* that nobody waits for: a step of a walk through a million rows.

        It runs when nothing else is due; ``hurry``, ``drain`` and ``stop`` leave it undone. One
        that the device refuses (NoSpace, OSError) is done again after the next tick: what a walk
        that ended there did not reach would stay unknown.
        """
        self._leisure.append(job)

    def submit_long(self, job: Job) -> None:
        """Queue a *job* that may take milliseconds; it runs in the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="kvfs-long", daemon=True)
            self._thread.start()
        self._long.put(job)

    def identify(self, ino: InodeNo, job: Job) -> None:
        """Queue *job*, which writes the identity of *ino*, in place of an earlier one.

        It is held back for a tick, so that a block that is closed and then renamed is identified
        once.
        """
        self._due.pop(ino, None)
        self._fresh[ino] = job
        if len(self._fresh) > self._jobs_max:
            self.do(self._fresh.pop(next(iter(self._fresh))))

    def carry_out(self, ino: InodeNo) -> None:
        """Write the pending identity of *ino* now, if there is one; raises what that raises."""
        job = self._fresh.pop(ino, None) or self._due.pop(ino, None)
        if job is not None:
            job()

    def forget(self, ino: InodeNo) -> None:
        """Drop the pending identity of *ino*, which is going away."""
        self._fresh.pop(ino, None)
        self._due.pop(ino, None)

    def tick(self) -> None:
        """Make due what waited for it, identities first of all; called a few times a second."""
        self._leisure += self._put_off
        self._put_off.clear()
        if not self._due:
            self._due, self._fresh = self._fresh, self._due

    def run_one(self) -> bool:
        """Do one short job; False when none is due. Called when no request waits."""
        if self._run_due():
            return True
        if not self._leisure:
            return False
        self.do(self._go_on_at_leisure)
        return True

    def work(self, turn_s: float) -> None:
        """Do short jobs for about *turn_s*; a tick's part, since the loop may never be idle.

        Among them one that has leisure: where jobs never end a walk would stand still.
        """
        end_s = time.monotonic() + turn_s
        if self._leisure:
            self.do(self._go_on_at_leisure)
        while self.run_one() and time.monotonic() < end_s:
            pass

    def hurry(self) -> None:
        """Do all short jobs now, identities included, but nothing that has leisure."""
        while self._run_due() or self._fresh:
            self.tick()

    def drain(self) -> None:
        """Do all that is queued, identities and long jobs included."""
        done = threading.Event()
        if self._thread is not None:
            self._long.put(done.set)
        self.hurry()
        if self._thread is not None:
            done.wait()
            self.hurry()  # what the long ones handed over

    def discard(self) -> None:
        """Drop all that is queued: the device is gone. What is under way ends by itself."""
        for queued in (self._jobs, self._fresh, self._due, self._leisure, self._put_off):
            queued.clear()
        with contextlib.suppress(Empty):
            while True:
                self._long.get_nowait()

    def stop(self) -> None:
        """Do what is queued and end the thread."""
        self.drain()
        if self._thread is not None:
            self._long.put(None)
            self._thread.join()
            self._thread = None

    def _run_due(self) -> bool:
        """Do one short job that must be done; False if there is none."""
        if self._jobs:
            self.do(self._jobs.popleft())
        elif self._due:
            self.do(self._due.pop(next(iter(self._due))))
        else:
            return False
        return True

    def _go_on_at_leisure(self) -> None:
        """Do the next job that nobody waits for, or put it off."""
        job = self._leisure.popleft()
        try:
            job()
        except (NoSpace, OSError) as error:
            if job not in self._told:
                _log.warning("a walk through the index is put off: %s", error)
                self._told.add(job)
            self._put_off.append(job)
        else:
            self._told.discard(job)

    def _work(self) -> None:
        while (job := self._long.get()) is not None:
            self.do(job)
