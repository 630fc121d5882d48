"""Work off the hot path: background jobs, and one thread a drive for long ones.

Jobs prepare, unlink and write identities. Short ones run on the event loop's thread when no request
waits, and give what may wait for a drive to a thread of that drive (device_thread.py). Long jobs,
such as unlinking a large extent, go to another thread of that drive. A job's failure is logged and
counted, never raised.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final, Generic, TypeVar

from kvfs.core.drives import ByDrive
from kvfs.core.errors import NoSpace
from kvfs.core.types import FIRST_DRIVE, NO_INODE, InodeNo
from kvfs.storage.device_thread import ASKS_MAX, DriveThreads, Loop

_log: Final = logging.getLogger(__name__)

R = TypeVar("R")
Job = Callable[[], None]


class Background:
    """Queues of jobs: at most *jobs_max* short ones, identities, and a thread for long ones."""

    def __init__(self, jobs_max: int, io_threads: int = ASKS_MAX, drives: int = 1) -> None:
        """*io_threads*: for the transfers of each of the pool's *drives*."""
        self._jobs_max = jobs_max
        self._jobs: deque[Job] = deque()
        #: Identity jobs queued since the last tick; older ones are due.
        self._fresh: dict[InodeNo, Job] = {}
        self._due: dict[InodeNo, Job] = {}
        self._leisure: deque[Job] = deque()
        #: Low-priority jobs that the device refused since the last tick, and those already logged.
        self._put_off: list[Job] = []
        self._told: set[Job] = set()
        self._long = ByDrive([_LongThread(self.do) for _ in range(drives)])
        self.failures = 0
        self.drives: Final = ByDrive(
            [DriveThreads(self._count_failure, io_threads) for _ in range(drives)]
        )
        #: The threads of the drive that holds an inode's file.
        self.of: Final = self.drives.of
        self._first: Final = self.drives.all[FIRST_DRIVE].device

    @property
    def is_serving(self) -> bool:
        """Whether a loop serves requests, so that what needs a drive is done in threads."""
        return self._first.is_serving

    @property
    def is_crowded(self) -> bool:
        """Whether no drive's thread should get more: jobs of one that answers do not wait."""
        return all(threads.device.is_crowded for threads in self.drives.all)

    def _count_failure(self) -> None:
        self.failures += 1

    @property
    def backlog(self) -> int:
        """Jobs not yet done."""
        queued = len(self._jobs) + len(self._fresh) + len(self._due) + len(self._leisure)
        pending = sum(threads.device.pending for threads in self.drives.all)
        waiting = sum(long.waiting for long in self._long.all)
        return queued + len(self._put_off) + waiting + pending

    def do(self, job: Job) -> None:
        """Do *job* at once, on the caller's thread. A failure is logged and counted."""
        try:
            job()
        except Exception:
            self.failures += 1
            _log.exception("background job failed")

    def submit(self, job: Job) -> None:
        """Queue a short *job*. If the queue is full, do the oldest one now, to slow the caller.

        If the device's thread has too much to do, jobs wait here: one for each block or less.
        """
        self._jobs.append(job)
        if len(self._jobs) > self._jobs_max and not self.is_crowded:
            self.do(self._jobs.popleft())

    def hand_over(self, job: Job) -> None:
        """Queue a short *job* from the thread for long jobs; the loop does it, never the caller."""
        self._jobs.append(job)

    def submit_leisure(self, job: Job) -> None:
        """Queue a short *job* of low priority, such as a step of a scan of a million rows.

        It runs when nothing else is due; ``hurry``, ``drain`` and ``stop`` leave it undone. If the
        device refuses it (NoSpace, OSError), it is done again after the next tick, so that the
        scan goes on.
        """
        self._leisure.append(job)

    def submit_long(self, job: Job, ino: InodeNo = NO_INODE) -> None:
        """Queue a *job* that may take milliseconds; it runs in the thread of *ino*'s drive."""
        self._long.of(ino).submit(job)

    def identify(self, ino: InodeNo, job: Job) -> None:
        """Queue *job*, which writes the identity of *ino*, in place of an earlier one.

        It waits for a tick, so that a block that is closed and then renamed is written once.
        """
        self._due.pop(ino, None)
        self._fresh[ino] = job
        if len(self._fresh) > self._jobs_max and not self.is_crowded:
            self.do(self._fresh.pop(next(iter(self._fresh))))

    def carry_out(self, ino: InodeNo) -> None:
        """Write the pending identity of *ino* now, if there is one. Raises what the job raises."""
        job = self._fresh.pop(ino, None) or self._due.pop(ino, None)
        if job is not None:
            job()

    def forget(self, ino: InodeNo) -> None:
        """Drop the pending identity of *ino*, which is going away."""
        self._fresh.pop(ino, None)
        self._due.pop(ino, None)

    def make_due(self) -> None:
        """Make waiting jobs due, identities first; called a few times a second."""
        self._leisure += self._put_off
        self._put_off.clear()
        if not self._due:
            self._due, self._fresh = self._fresh, self._due

    def run_one(self) -> bool:
        """Do one short job; False if none is due. Called when no request waits."""
        if not (self._jobs or self._due or self._leisure) or self.is_crowded:
            return False
        if not self._run_due():
            self.do(self._go_on_at_leisure)
        return True

    def work(self, turn_s: float) -> None:
        """Do short jobs for about *turn_s*: called at each tick, since the loop may never be idle.

        The first job is one of low priority, so that a scan goes on even if jobs never end.
        """
        end_s = time.monotonic() + turn_s
        for threads in self.drives.all:
            threads.device.hand_over()
            threads.device.run_ends()
        if self._leisure:
            self.do(self._go_on_at_leisure)
        while self.run_one() and time.monotonic() < end_s:
            pass

    def hurry(self) -> None:
        """Do all short jobs now, including identities, except those of low priority.

        While a loop serves, what they do on the device is only given to the thread.
        """
        while self._run_due() or self._fresh:
            self.make_due()
        self.hand_over_work()

    def hand_over_work(self) -> None:
        """Hand over what is gathered for the drives' threads, because somebody waits for it."""
        for threads in self.drives.all:
            threads.device.hand_over(wakes=True)

    def begin_serving(self, loop: Loop) -> None:
        """From now on *loop* serves requests: what may wait for the device is done in threads."""
        for drive in self.drives.all:
            for threads in drive.all:
                threads.begin_serving(loop)

    def end_serving(self) -> None:
        """Wait for what the threads have to do; from now on it is done at once."""
        for drive in self.drives.all:
            for threads in reversed(drive.all):
                threads.end_serving()

    def drain(self) -> None:
        """Do all queued jobs, including identities and long ones, except those of low priority."""
        self.hurry()  # which may start a thread
        while any(long.runs for long in self._long.all):
            for long in self._long.all:
                long.wait()
            if not (self._jobs or self._due or self._fresh):
                return
            self.hurry()  # what the long ones queued

    def discard(self) -> None:
        """Drop all queued jobs, because the device is gone. A running job ends by itself."""
        for drive in self.drives.all:
            for threads in drive.all:
                threads.abandon()
        for queued in (self._jobs, self._fresh, self._due, self._leisure, self._put_off):
            queued.clear()
        for long in self._long.all:
            long.discard()

    def stop(self) -> None:
        """Do all queued jobs and end the threads."""
        self.drain()
        for long in self._long.all:
            long.end()

    def _run_due(self) -> bool:
        """Do one short job of normal priority; False if there is none."""
        if self._jobs:
            self.do(self._jobs.popleft())
        elif self._due:
            self.do(self._due.pop(next(iter(self._due))))
        else:
            return False
        return True

    def _go_on_at_leisure(self) -> None:
        """Do the next job of low priority, or postpone it."""
        job = self._leisure.popleft()
        try:
            job()
        except (NoSpace, OSError) as error:
            if job not in self._told:
                _log.warning("index scan postponed: %s", error)
                self._told.add(job)
            self._put_off.append(job)
        else:
            self._told.discard(job)


class _LongThread:
    """Does the long jobs of one drive, one after the other; the first one starts it."""

    def __init__(self, do: Callable[[Job], None]) -> None:
        self._do = do
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def runs(self) -> bool:
        """Whether it was given a job ever."""
        return self._thread is not None

    @property
    def waiting(self) -> int:
        """How many jobs have not begun."""
        return self._jobs.qsize()

    def submit(self, job: Job) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="kvfs-long", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def wait(self) -> None:
        """Wait until all jobs are done that were submitted before."""
        if self._thread is not None:
            done = threading.Event()
            self._jobs.put(done.set)
            done.wait()

    def discard(self) -> None:
        """Drop the jobs that have not begun."""
        with contextlib.suppress(Empty):
            while True:
                self._jobs.get_nowait()

    def end(self) -> None:
        """End the thread after its jobs."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._do(job)


class Aside(Generic[R]):
    """At most one job in a thread of its own, whose result is polled.

    The job may take seconds; only ``join`` waits for it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._results: list[R] = []

    @property
    def busy(self) -> bool:
        """Whether a job is running, or its result was not taken yet."""
        return self._thread is not None

    @property
    def thread_id(self) -> int | None:
        """The kernel's number of the thread of the job; None while there is none."""
        return None if self._thread is None else self._thread.native_id

    def start(self, job: Callable[[], R]) -> None:
        """Run *job*, which must not raise; not while ``busy``."""
        assert self._thread is None, "one at a time"

        def work() -> None:
            self._results.append(job())

        self._thread = threading.Thread(target=work, name=self._name, daemon=True)
        self._thread.start()

    def pop_result(self) -> R | None:
        """Return the result of the job once it has ended; None if it has not, or was taken."""
        if not self._results:
            return None
        self.join()
        return self._results.pop()

    def join(self) -> None:
        """Wait for the job under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
