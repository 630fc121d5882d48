"""Ends servers under a load that is recorded: by SIGKILL and by upgrades, and others take over.

Now and then the drive hangs, until the mount calls it silent and a while longer.
"""

import contextlib
import itertools
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Final, Self

from mount.supervisor.states import SHORT_LIFE_S
from tests.support.devices.power_cuts.hangs import Hangs
from tests.support.mounts.mounting import run_kvfs
from tests.support.mounts.supervised import Supervised

#: Between two ends: a server that lives for less counts as one that cannot serve.
_LEAST_S: Final = SHORT_LIFE_S + 0.2
_MOST_S: Final = SHORT_LIFE_S + 1.2
_UPGRADES_SHARE: Final = 0.25
#: The drive hangs each time that so many servers have ended.
_HANGS_EVERY: Final = 6
#: In how many of these a server is killed before the drive answers again.
_KILLS_SHARE: Final = 0.5


class During(StrEnum):
    """What is recorded while servers end."""

    #: No call waits for a device: what is older than the window is durable.
    AGEING = "servers end"
    #: Nothing becomes durable by itself: one fsync behind each end waits for all before it.
    HONOURED = "servers end, and an fsync comes behind each"
    #: The same with a window, too.
    HANGING = "servers end, and the drive hangs"


class TakeOvers:
    """A thread that ends the servers of one mount; as a context it runs meanwhile."""

    def __init__(
        self,
        mounted: Supervised,
        draw: random.Random,
        *,
        fsyncs: bool,
        hangs: Hangs | None = None,
    ) -> None:
        """*fsyncs*: behind each end, while none serves; to be honoured by the next server."""
        self._mounted = mounted
        self._fsyncs = fsyncs
        self._hangs = hangs
        self._draw = draw
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="take-overs")
        self._failure: BaseException | None = None
        self._killed = False
        #: When an fsync right behind the end of a server began, and when it had returned.
        self.synced_ns: list[tuple[int, int]] = []
        #: How many servers ended how, and what those had done.
        self.counts = Counter[str]()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Let the last one serve. Raises what went wrong."""
        self._ended.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            for number in itertools.count(1):
                if self._ended.wait(self._draw.uniform(_LEAST_S, _MOST_S)):
                    return
                if self._hangs is not None and number % _HANGS_EVERY == 0:
                    self._hang(self._hangs)
                else:
                    self._end_one(self._kill_or_upgrade)
        except BaseException as failure:  # the recording ends with it
            self._failure = failure

    def note_server(self) -> None:
        """Count what the present server has done, before it ends."""
        told = self._mounted.status()
        self.counts["evicted"] += told["eviction"]["blocks"]
        self.counts["copies"] += told["index_log"]["copies"]

    def _end_one(self, end: Callable[[], None]) -> None:
        self.note_server()
        # It is open before: the fsync is the first that the next server hears of it.
        root = os.open(self._mounted.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            end()
            if self._fsyncs:
                begun_ns = time.monotonic_ns()
                os.fsync(root)
                self.synced_ns.append((begun_ns, time.monotonic_ns()))
        finally:
            os.close(root)
        if self._killed:
            self._mounted.follow()
        else:
            self._mounted.adopt()

    def _kill_or_upgrade(self) -> None:
        self._killed = self._draw.random() >= _UPGRADES_SHARE
        if self._killed:
            self._kill()
        else:
            run_kvfs("upgrade", str(self._mounted.path))
            self.counts["upgrades"] += 1

    def _kill(self) -> None:
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            self._mounted.kill_server()
        self.counts["kills"] += 1

    def _hang(self, hangs: Hangs) -> None:
        """Have the drive hang; perhaps the server is killed before it answers again."""

        def kill() -> None:
            with hangs.hanging():
                self._kill()

        if self._draw.random() < _KILLS_SHARE:
            self._end_one(kill)
            self.counts["kills in a hang"] += 1
        else:
            with hangs.hanging():
                pass
        self.counts["hangs"] += 1
