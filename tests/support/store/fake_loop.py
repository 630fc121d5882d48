"""The event loop of a test: what other threads have it call waits for the thread of the test.

No test sleeps for a thread: it waits for the next call, which each piece of work ends with.
"""

import queue
import time
from collections.abc import Callable
from typing import Final

from kvfs.storage.device_thread import Step

#: A piece of work that takes longer hangs; the machine may be loaded.
_WAIT_S: Final = 60.0


class FakeLoop:
    """Implements ``kvfs.storage.background.Loop`` for the thread of a test."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Step] = queue.SimpleQueue()

    def run_sync_soon(self, call: Step) -> None:
        """Keep *call* until the test's thread does it; called in any thread."""
        self._calls.put(call)

    @property
    def waiting(self) -> int:
        """How many calls wait for the test's thread."""
        return self._calls.qsize()

    def run(self) -> None:
        """Do the calls that wait, and no others."""
        for _ in range(self._calls.qsize()):
            self._calls.get()()

    def run_until(self, holds: Callable[[], bool], what: str) -> None:
        """Do calls, as they come, until *holds*."""
        give_up_s = time.monotonic() + _WAIT_S
        while not holds():
            left_s = give_up_s - time.monotonic()
            assert left_s > 0, f"not within {_WAIT_S} s: {what}"
            try:
                self._calls.get(timeout=left_s)()
            except queue.Empty:
                raise AssertionError(f"not within {_WAIT_S} s: {what}") from None
