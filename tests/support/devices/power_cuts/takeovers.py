"""Ends servers under a load that is recorded: by SIGKILL and by upgrades, and others take over."""

import contextlib
import os
import random
import threading
import time
from collections import Counter
from enum import StrEnum
from typing import Final, Self

from mount.supervisor.states import SHORT_LIFE_S
from tests.support.mounts.mounting import run_kvfs
from tests.support.mounts.supervised import Supervised

#: Between two ends: a server that lives for less counts as one that cannot serve.
_LEAST_S: Final = SHORT_LIFE_S + 0.2
_MOST_S: Final = SHORT_LIFE_S + 1.2
_UPGRADES_SHARE: Final = 0.25


class During(StrEnum):
    """What is recorded while servers end."""

    #: No call waits for a device: what is older than the window is durable.
    AGEING = "servers end"
    #: Nothing becomes durable by itself: one fsync behind each end waits for all before it.
    HONOURED = "servers end, and an fsync comes behind each"


class TakeOvers:
    """A thread that ends the servers of one mount; as a context it runs meanwhile."""

    def __init__(self, mounted: Supervised, draw: random.Random, *, fsyncs: bool) -> None:
        """*fsyncs*: behind each end, while none serves; to be honoured by the next server."""
        self._mounted = mounted
        self._fsyncs = fsyncs
        self._draw = draw
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="take-overs")
        self._failure: BaseException | None = None
        self._killed = False
        #: When an fsync right behind the end of a server began, and when it had returned.
        self.synced_ns: list[tuple[int, int]] = []
        #: How many servers ended how, and what those had evicted.
        self.counts = Counter[str]()
        self.evicted_blocks = 0

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
            while not self._ended.wait(self._draw.uniform(_LEAST_S, _MOST_S)):
                self._end_one()
        except BaseException as failure:  # the recording ends with it
            self._failure = failure

    def _end_one(self) -> None:
        self.evicted_blocks += self._mounted.status()["eviction"]["blocks"]
        # It is open before: the fsync is the first that the next server hears of it.
        root = os.open(self._mounted.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._end()
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

    def _end(self) -> None:
        self._killed = self._draw.random() >= _UPGRADES_SHARE
        if not self._killed:
            run_kvfs("upgrade", str(self._mounted.path))
            self.counts["upgrades"] += 1
            return
        with contextlib.suppress(ProcessLookupError):
            self._mounted.kill_server()
        self.counts["kills"] += 1
