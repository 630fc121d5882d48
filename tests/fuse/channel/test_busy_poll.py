"""Waiting awake: only where the next request came at once before, and no longer than allowed."""

from collections import deque
from typing import Final

from mount.fuse.request_reader import LOADS, BusyPoll

_BUSY_US: Final = 40
_LONGEST_MS: Final = 15
_FLUSH: Final = 25
_OPEN: Final = 14


class Kernel:
    """A device whose requests come after given times; ``slept`` has the waits that were asleep."""

    def __init__(self, *gaps_us: int) -> None:
        self._gaps_us = deque(gaps_us)
        self._now_ns = 0
        self._next_ns = self._gaps_us.popleft() * 1000
        self.slept: list[int] = []

    def clock_ns(self) -> int:
        """Look at the clock, which takes a microsecond."""
        self._now_ns += 1000
        return self._now_ns

    def poll(self, wait_ms: int) -> bool:
        """Do what poll(2) does."""
        if wait_ms:
            self.slept.append(wait_ms)
            self._now_ns = max(self._now_ns, min(self._next_ns, self._now_ns + wait_ms * 10**6))
        if self._now_ns < self._next_ns:
            return False
        if self._gaps_us:
            self._next_ns = self._now_ns + self._gaps_us.popleft() * 1000
        return True


def waiter(kernel: Kernel, busy_us: int = _BUSY_US) -> BusyPoll:
    """Return the wait for requests of *kernel*."""
    return BusyPoll(kernel.poll, busy_us, LOADS + 1, kernel.clock_ns)


def test_what_comes_at_once_is_awaited_awake_from_the_third_time_on() -> None:
    kernel = Kernel(20, 20, 20, 20, 20)
    wait = waiter(kernel)
    assert all(wait.wait(_FLUSH, _LONGEST_MS) for _ in range(5))
    assert kernel.slept == [_LONGEST_MS, _LONGEST_MS]


def test_each_kind_of_request_learns_for_itself() -> None:
    kernel = Kernel(20, 300, 20, 300, 20, 300, 20, 300)
    wait = waiter(kernel)
    for _ in range(4):
        wait.wait(_FLUSH, _LONGEST_MS)
        slept = len(kernel.slept)
        wait.wait(_OPEN, _LONGEST_MS)
        assert len(kernel.slept) == slept + 1, "a load follows: the client copies bytes"
    assert len(kernel.slept) == 2 + 4


def test_one_that_does_not_come_is_awaited_asleep_and_learned_anew() -> None:
    kernel = Kernel(20, 20, 5000, 20, 20, 20)
    wait = waiter(kernel)
    assert [wait.wait(_FLUSH, _LONGEST_MS) for _ in range(3)] == [True, True, True]
    assert len(kernel.slept) == 3
    assert [wait.wait(_FLUSH, _LONGEST_MS) for _ in range(3)] == [True, True, True]
    assert len(kernel.slept) == 5, "twice asleep, then awake again"


def test_nothing_within_the_longest_wait_is_no_request() -> None:
    kernel = Kernel(20, 20, 10**6)
    wait = waiter(kernel)
    assert [wait.wait(_FLUSH, _LONGEST_MS) for _ in range(4)] == [True, True, False, False]


def test_a_busy_wait_of_0_never_is_one() -> None:
    kernel = Kernel(*[1] * 8)
    wait = waiter(kernel, busy_us=0)
    assert all(wait.wait(_FLUSH, _LONGEST_MS) for _ in range(8))
    assert kernel.slept == [_LONGEST_MS] * 8


def test_what_follows_a_load_is_awaited_awake_for_less_time() -> None:
    """Opens and closes at once are one kind: most loads have bytes to copy in between."""
    kernel = Kernel(5, 5, 5, 20, 20)
    wait = waiter(kernel)
    assert all(wait.wait(LOADS, _LONGEST_MS) for _ in range(3))
    assert len(kernel.slept) == 2, "the third one awake"
    assert wait.wait(LOADS, _LONGEST_MS)
    assert len(kernel.slept) == 3, "asleep after 8 us"
    loads = Kernel(5, 200, 5, 200, 5, 200, 5, 200)
    wait = waiter(loads)
    assert all(wait.wait(LOADS, _LONGEST_MS) for _ in range(8))
    assert len(loads.slept) == 8, "never awake"
