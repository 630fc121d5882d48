"""Work off the hot path: background jobs, and threads that do what may wait for the device.

Jobs prepare, unlink and write identities. Short ones run on the event loop's thread when no request
waits, and give what may wait for the device to a thread (``device``), which does it in order. Long
jobs, such as unlinking a large extent, go to another thread. A job's failure is logged and counted,
never raised.

The event loop's thread never waits for the device. A piece of work for a ``DeviceThread`` is two
steps: the first runs in a thread, the second follows on the loop with its result. With one thread
all work is done in the order of its submission: what is written to a file, and the removal of that
file. While no loop serves requests, at a start and at a stop, both steps are done at once by the
caller.

Waking a thread, and the loop again, costs more than most pieces of work. So work that nobody waits
for is gathered, and handed over by the dozen, or at the next tick.
"""

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final, Generic, Protocol, TypeVar

from kvfs.core.errors import NoSpace
from kvfs.core.types import InodeNo

_log: Final = logging.getLogger(__name__)

R = TypeVar("R")
Job = Callable[[], None]
#: The most threads that fetch what requests lack; with a silent device all of them may be stuck.
_ASKS_MAX: Final = 8
Step = Callable[[], None]
#: A piece of work; returns what follows it on the loop.
_Work = Callable[[], Step | None]
#: So many pieces of gathered work are handed over without waiting for the tick.
_GATHERED_MAX: Final = 16
#: With more pieces of work than this, what can wait elsewhere should (``is_crowded``).
_CROWD: Final = 1024


class Loop(Protocol):
    """The event loop that serves requests."""

    def run_sync_soon(self, call: Step) -> None:
        """Have the loop call *call*; called in any thread."""


class DeviceThread:
    """A queue of work for *threads* threads, and of what follows on the loop."""

    def __init__(self, name: str, failed: Step, *, threads: int = 1, gathers: bool = False) -> None:
        """*failed* is called on the loop for each piece of work that fails unforeseen.

        If it *gathers* work, call ``hand_over`` and ``run_ends`` a few times a second.
        """
        self._name = name
        self._failed = failed
        self._threads_max = threads
        self._threads: list[threading.Thread] = []
        self._gathers = gathers
        self._gathered: list[_Work] = []
        #: Work that is handed over, and whether the loop is to be woken after it.
        self._works: SimpleQueue[tuple[list[_Work], bool] | None] = SimpleQueue()
        self._ends: deque[Step | None] = deque()
        self._wake: Step | None = None
        #: How many pieces were submitted, and how many have ended, with what follows.
        self.submitted = self.ended = 0

    @property
    def is_serving(self) -> bool:
        """Whether a loop serves requests, so that work is done in threads."""
        return self._wake is not None

    @property
    def pending(self) -> int:
        """How many pieces of work have not ended."""
        return self.submitted - self.ended

    @property
    def is_crowded(self) -> bool:
        """Whether so much waits that work which can wait elsewhere should."""
        return self.pending >= _CROWD

    def submit(
        self,
        work: Callable[[], R],
        end: Callable[[R], None] | None = None,
        *,
        failed: Callable[[Exception], None] | None = None,
        at_once: bool = False,
    ) -> None:
        """Do *work* in a thread, and *end*, if there is one, with its result on the loop.

        *at_once*: somebody waits for it. If *work* raises, *end* is not called, but *failed* on the
        loop with the error; without it that is logged and counted. While no loop serves, *work* and
        *end* are done by the caller, and what they raise is raised.
        """
        if self._wake is None:
            result = work()
            if end is not None:
                end(result)
            return
        self.submitted += 1
        self._gathered.append(functools.partial(self._do, work, end, failed))
        if at_once or not self._gathers:
            self.hand_over(wakes=True)
        elif len(self._gathered) >= _GATHERED_MAX:
            self.hand_over()

    def hand_over(self, *, wakes: bool = False) -> None:
        """Hand over what is gathered; if it *wakes*, what follows is done as soon as it can be."""
        if not (self._gathered or wakes) or self._wake is None:
            return
        if len(self._threads) < min(self._threads_max, self.pending):
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()
        self._works.put((self._gathered, wakes))
        self._gathered = []

    def after_all(self, end: Step) -> None:
        """Do *end* on the loop once all that was submitted before has ended (with one thread)."""
        self.submit(lambda: None, lambda _: end(), at_once=True)

    def run_ends(self) -> None:
        """Do what follows the work that was done; on the loop."""
        while self._ends:
            end = self._ends.popleft()
            self.ended += 1
            if end is None:
                continue
            try:
                end()
            except Exception:
                self._failed()
                _log.exception("work on the device failed")

    def begin_serving(self, loop: Loop) -> None:
        """From now on work is done in threads, and what follows on *loop*."""
        self._wake = functools.partial(loop.run_sync_soon, self.run_ends)

    def end_serving(self) -> None:
        """Wait for all work, and do what follows; from now on work is done at once."""
        while self._threads or self._ends or self._gathered:
            self.hand_over()
            for _ in self._threads:
                self._works.put(None)
            for thread in self._threads:
                thread.join()
            self._threads.clear()
            self.run_ends()  # which may submit more
        self._wake = None

    def abandon(self) -> None:
        """Forget what waits, because the device is gone; what is under way ends by itself."""
        self._wake = None
        with contextlib.suppress(Empty):
            while True:
                self._works.get_nowait()
        self._works = SimpleQueue()
        self._threads.clear()
        self._gathered.clear()
        self._ends = deque()
        self.ended = self.submitted

    def _work(self) -> None:
        works, ends = self._works, self._ends
        while (handed := works.get()) is not None:
            some, wakes = handed
            for work in some:
                ends.append(work())
            wake = self._wake
            if wakes and wake is not None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    wake()

    @staticmethod
    def _do(
        work: Callable[[], R],
        end: Callable[[R], None] | None,
        failed: Callable[[Exception], None] | None,
    ) -> Step | None:
        """Return what follows *work* on the loop, after it was done."""
        try:
            result = work()
        except Exception as error:  # raised again on the loop, which logs and counts it
            return functools.partial(_raise if failed is None else failed, error)
        return None if end is None else functools.partial(end, result)


def _raise(error: Exception) -> None:
    raise error


class Background:
    """Queues of jobs: at most *jobs_max* short ones, identities, and one thread for long ones."""

    def __init__(self, jobs_max: int, io_threads: int = _ASKS_MAX) -> None:
        self._jobs_max = jobs_max
        self._jobs: deque[Job] = deque()
        #: Identity jobs queued since the last tick; older ones are due.
        self._fresh: dict[InodeNo, Job] = {}
        self._due: dict[InodeNo, Job] = {}
        self._leisure: deque[Job] = deque()
        #: Low-priority jobs that the device refused since the last tick, and those already logged.
        self._put_off: list[Job] = []
        self._told: set[Job] = set()
        self._long: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.failures = 0
        #: Does what jobs have to do on the device, in order; what follows runs on the loop.
        self.device: Final = DeviceThread("kvfs-device", self._count_failure, gathers=True)
        #: Fetches what requests lack, several at a time.
        self.asks: Final = DeviceThread("kvfs-asks", self._count_failure, threads=_ASKS_MAX)
        #: Reads and writes for clients, on the daemon path.
        self.transfers: Final = DeviceThread("kvfs-io", self._count_failure, threads=io_threads)

    def _count_failure(self) -> None:
        self.failures += 1

    @property
    def backlog(self) -> int:
        """Jobs not yet done."""
        queued = len(self._jobs) + len(self._fresh) + len(self._due) + len(self._leisure)
        return queued + len(self._put_off) + self._long.qsize() + self.device.pending

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
        if len(self._jobs) > self._jobs_max and not self.device.is_crowded:
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

    def submit_long(self, job: Job) -> None:
        """Queue a *job* that may take milliseconds; it runs in the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="kvfs-long", daemon=True)
            self._thread.start()
        self._long.put(job)

    def identify(self, ino: InodeNo, job: Job) -> None:
        """Queue *job*, which writes the identity of *ino*, in place of an earlier one.

        It waits for a tick, so that a block that is closed and then renamed is written once.
        """
        self._due.pop(ino, None)
        self._fresh[ino] = job
        if len(self._fresh) > self._jobs_max and not self.device.is_crowded:
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
        if self.device.is_crowded:
            return False
        if self._run_due():
            return True
        if not self._leisure:
            return False
        self.do(self._go_on_at_leisure)
        return True

    def work(self, turn_s: float) -> None:
        """Do short jobs for about *turn_s*: called at each tick, since the loop may never be idle.

        The first job is one of low priority, so that a scan goes on even if jobs never end.
        """
        end_s = time.monotonic() + turn_s
        self.device.hand_over()
        self.device.run_ends()
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
        self.device.hand_over(wakes=True)

    def begin_serving(self, loop: Loop) -> None:
        """From now on *loop* serves requests: what may wait for the device is done in threads."""
        for threads in (self.device, self.asks, self.transfers):
            threads.begin_serving(loop)

    def end_serving(self) -> None:
        """Wait for what the threads have to do; from now on it is done at once."""
        for threads in (self.transfers, self.asks, self.device):
            threads.end_serving()

    def drain(self) -> None:
        """Do all queued jobs, including identities and long ones, except those of low priority."""
        self.hurry()  # which may start the thread
        while self._thread is not None:
            done = threading.Event()
            self._long.put(done.set)
            done.wait()
            if not (self._jobs or self._due or self._fresh):
                return
            self.hurry()  # what the long ones queued

    def discard(self) -> None:
        """Drop all queued jobs, because the device is gone. A running job ends by itself."""
        for threads in (self.device, self.asks, self.transfers):
            threads.abandon()
        for queued in (self._jobs, self._fresh, self._due, self._leisure, self._put_off):
            queued.clear()
        with contextlib.suppress(Empty):
            while True:
                self._long.get_nowait()

    def stop(self) -> None:
        """Do all queued jobs and end the thread."""
        self.drain()
        if self._thread is not None:
            self._long.put(None)
            self._thread.join()
            self._thread = None

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

    def _work(self) -> None:
        while (job := self._long.get()) is not None:
            self.do(job)


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
