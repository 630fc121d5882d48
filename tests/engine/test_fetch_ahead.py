"""What waits to be read ahead, on its own: in order, and no more than may wait."""

import threading
from types import SimpleNamespace
from typing import Any, Final

from kvfs.core.types import InodeNo
from kvfs.engine.take_hints import FETCHES_MAX, FetchAhead
from kvfs.pool.rules.hints import HintCounts

PATIENCE_S: Final = 60.0


class SlowPool:
    """A pool whose extents can be opened once it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.opened: list[InodeNo] = []
        self.touched: list[InodeNo] = []
        self.extents: Any = self
        self.syscalls = SimpleNamespace(preadv=lambda *_: 0, close=lambda _: None)
        heat = SimpleNamespace(touch=self.touched.append)
        self.rules = SimpleNamespace(heat=heat, hints=SimpleNamespace(counts=HintCounts()))

    def open(self, ino: InodeNo, _flags: int) -> int:
        assert self.let_go.wait(PATIENCE_S)
        self.opened.append(ino)
        if ino % 2:
            raise FileNotFoundError  # it was evicted meanwhile
        return 3


def test_more_than_may_wait_is_not_fetched() -> None:
    pool: Any = SlowPool()
    fetch = FetchAhead(pool.rules, pool.extents, pool.syscalls)
    asked = [InodeNo(number) for number in range(FETCHES_MAX + 20)]
    taken = [ino for ino in asked if fetch.add(ino)]
    assert FETCHES_MAX <= len(taken) <= FETCHES_MAX + 1  # one may be under way
    assert pool.touched == taken
    pool.let_go.set()
    while not pool.rules.hints.counts.fetched:
        fetch.run_due()
    assert pool.opened == taken
    assert pool.rules.hints.counts.fetched == len([ino for ino in taken if ino % 2 == 0])


def test_what_waits_is_dropped_at_a_stop() -> None:
    pool: Any = SlowPool()
    fetch = FetchAhead(pool.rules, pool.extents, pool.syscalls)
    for number in range(100):
        fetch.add(InodeNo(number))
    threading.Timer(0.0, pool.let_go.set).start()
    fetch.close()
    assert len(pool.opened) <= 100
