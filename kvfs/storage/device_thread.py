"""Threads that wait for a drive, so that the event loop's thread never does.

A piece of work for a ``DeviceThread`` is two steps: the first runs in a thread, the second follows
on the loop with its result. With one thread all work is done in the order of its submission: what
is written to a file, and the removal of that file. While no loop serves requests, at a start and at
a stop, both steps are done at once by the caller.

Waking a thread, and the loop again, costs more than most pieces of work. So work that nobody waits
for is gathered, and handed over by the dozen, or at the next tick. Each drive has threads of its
own: one that does not answer keeps those of the others from nothing.
"""

import contextlib
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final, Protocol, TypeVar

_log: Final = logging.getLogger(__name__)

R = TypeVar("R")
#: The most threads that fetch what requests lack; with a silent device all of them may be stuck.
ASKS_MAX: Final = 8
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
        """Call the ends of work that the threads have done; on the loop."""
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


class DriveThreads:
    """The threads that wait for one drive, and for no other."""

    def __init__(self, failed: Step, io_threads: int) -> None:
        #: Does what jobs have to do on the drive, in order; what follows runs on the loop.
        self.device: Final = DeviceThread("kvfs-device", failed, gathers=True)
        #: Fetches what requests lack, several at a time.
        self.asks: Final = DeviceThread("kvfs-asks", failed, threads=ASKS_MAX)
        #: Reads and writes for clients, on the daemon path.
        self.transfers: Final = DeviceThread("kvfs-io", failed, threads=io_threads)
        #: Has the kernel read what a client will ask for next.
        self.ahead: Final = DeviceThread("kvfs-ahead", failed, gathers=True)
        #: In the order in which they begin; they end in the other.
        self.all: Final = (self.device, self.asks, self.transfers, self.ahead)
