"""Work for the device: at once, or in order in a thread, and what follows only on the loop."""

import threading
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from kvfs.storage.device_thread import DeviceThread, DriveThreads
from tests.support.store.fake_loop import FakeLoop

WAIT_S: Final = 60.0
#: With so many pieces of work the thread is crowded.
CROWD: Final = 1024


class Bench:
    """A device's thread, what it is told to do, and what was done."""

    def __init__(self, threads: int = 1) -> None:
        self.failures = 0
        self.log: list[str] = []
        self.ends: list[tuple[str, int]] = []
        self.loop = FakeLoop()
        self.thread = DeviceThread("kvfs-test", self._fail, threads=threads)
        self.may_go_on = threading.Event()

    def _fail(self) -> None:
        self.failures += 1

    def working(self, what: str) -> Callable[[], str]:
        """Return work that logs *what*, and has it as its result."""

        def work() -> str:
            self.log.append(what)
            return what

        return work

    def end(self, what: str) -> None:
        """Note that *what* was done, and in which thread that was said."""
        self.ends.append((what, threading.get_ident()))

    def said(self) -> list[str]:
        """Return what ends were told, all of them on this thread."""
        assert {thread for _, thread in self.ends} <= {threading.get_ident()}
        return [what for what, _ in self.ends]

    def submit(self, *whats: str) -> None:
        """Submit one piece of work for each of *whats*."""
        for what in whats:
            self.thread.submit(self.working(what), self.end)

    def hold(self) -> None:
        """Submit work that lasts until ``may_go_on``; return when it is under way."""
        started = threading.Event()

        def work() -> str:
            started.set()
            assert self.may_go_on.wait(WAIT_S)
            return "held"

        self.thread.submit(work, self.end)
        assert started.wait(WAIT_S)

    def serve(self) -> None:
        """Begin to serve on this thread."""
        self.thread.begin_serving(self.loop)

    def run_all(self) -> None:
        """Do what follows until nothing is pending."""
        self.loop.run_until(lambda: not self.thread.pending, "all work has ended")


def ended(bench: Bench) -> Bench:
    bench.may_go_on.set()
    bench.thread.end_serving()
    return bench


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    ended(made)


@pytest.fixture
def serving(bench: Bench) -> Bench:
    bench.serve()
    return bench


def fail() -> str:
    raise OSError("the device is gone")


# ---- while no loop serves ----


def test_while_no_loop_serves_work_and_its_end_are_done_at_once(bench: Bench) -> None:
    assert not bench.thread.is_serving
    bench.thread.submit(bench.working("a"), lambda what: bench.log.append(f"{what} ended"))
    bench.thread.submit(bench.working("b"))
    assert bench.log == ["a", "a ended", "b"]
    assert bench.thread.pending == 0


def test_while_no_loop_serves_what_is_raised_is_raised(bench: Bench) -> None:
    with pytest.raises(OSError, match="the device is gone"):
        bench.thread.submit(fail, bench.end)
    assert bench.said() == []

    def refuse(what: str) -> None:
        raise OSError(f"no end of {what}")

    with pytest.raises(OSError, match="no end of a"):
        bench.thread.submit(bench.working("a"), refuse)
    assert bench.failures == 0


# ---- while one serves ----


def test_work_is_done_in_order_and_its_ends_on_the_loop(serving: Bench) -> None:
    assert serving.thread.is_serving
    whats = [str(number) for number in range(100)]
    serving.submit(*whats)
    serving.run_all()
    assert serving.log == serving.said() == whats


def test_no_end_is_done_but_by_the_loop(serving: Bench) -> None:
    """Nor does one that was submitted while others wait begin before them."""
    serving.hold()
    serving.submit("a", "b")
    assert (serving.thread.pending, serving.log) == (3, [])
    serving.may_go_on.set()
    done = threading.Event()
    serving.thread.submit(done.set)
    assert done.wait(WAIT_S)
    assert serving.log == ["a", "b"]
    assert serving.said() == []
    assert serving.thread.pending >= 3
    serving.thread.run_ends()
    assert serving.said() == ["held", "a", "b"]


def test_the_loop_is_woken_after_each_piece(serving: Bench) -> None:
    serving.submit("a", "b")
    serving.run_all()
    serving.thread.end_serving()
    assert serving.loop.waiting <= 2
    serving.loop.run()
    assert serving.said() == ["a", "b"], "a wake that comes late does nothing"


def test_work_that_fails_is_logged_and_counted_and_others_go_on(
    serving: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    serving.submit("a")
    serving.thread.submit(fail, serving.end)
    serving.submit("b")
    serving.run_all()
    assert serving.said() == ["a", "b"]
    assert serving.failures == 1
    assert "the device is gone" in caplog.text


def test_an_end_that_fails_is_logged_and_counted_and_others_go_on(
    serving: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(what: str) -> None:
        raise OSError(f"no end of {what}")

    serving.thread.submit(serving.working("a"), refuse)
    serving.submit("b")
    serving.run_all()
    assert serving.said() == ["b"]
    assert (serving.failures, serving.thread.pending) == (1, 0)
    assert "no end of a" in caplog.text


def test_work_needs_no_end(serving: Bench) -> None:
    serving.thread.submit(serving.working("a"))
    serving.run_all()
    assert serving.log == ["a"]
    assert serving.failures == 0


def test_an_end_may_submit_more(serving: Bench) -> None:
    def again(what: str) -> None:
        serving.end(what)
        if len(what) < 3:
            serving.thread.submit(serving.working(what + "a"), again)

    serving.thread.submit(serving.working("a"), again)
    serving.run_all()
    assert serving.log == serving.said() == ["a", "aa", "aaa"]


def test_it_counts_what_was_submitted_and_what_has_ended(serving: Bench) -> None:
    serving.submit("a", "b", "c")
    assert serving.thread.submitted == 3
    serving.run_all()
    assert (serving.thread.submitted, serving.thread.ended) == (3, 3)


def test_it_is_crowded_with_a_thousand_pieces_of_work(serving: Bench) -> None:
    serving.hold()
    serving.submit(*["x"] * (CROWD - 2))
    assert not serving.thread.is_crowded
    serving.submit("last")
    assert serving.thread.is_crowded
    serving.may_go_on.set()
    serving.run_all()
    assert not serving.thread.is_crowded


def test_several_threads_work_at_once() -> None:
    bench = Bench(threads=3)
    bench.serve()
    meeting = threading.Barrier(3, timeout=WAIT_S)
    for _ in range(3):
        bench.thread.submit(lambda: str(meeting.wait()), bench.end)
    bench.run_all()
    assert sorted(bench.said()) == ["0", "1", "2"], "they met"
    ended(bench)


def test_one_that_waits_holds_up_no_other() -> None:
    bench = Bench(threads=2)
    bench.serve()
    bench.hold()
    bench.submit("a", "b")
    bench.loop.run_until(lambda: bench.thread.pending == 1, "the others have ended")
    assert bench.said() == ["a", "b"]
    ended(bench)
    assert bench.said() == ["a", "b", "held"]


# ---- the ends ----


def test_the_end_of_serving_waits_for_work_and_does_what_follows(serving: Bench) -> None:
    serving.hold()
    serving.submit("a", "b")
    releasing = threading.Timer(0.0, serving.may_go_on.set)
    releasing.start()
    serving.thread.end_serving()
    releasing.join()
    assert serving.said() == ["held", "a", "b"]
    assert (serving.thread.is_serving, serving.thread.pending) == (False, 0)
    serving.submit("c")
    assert serving.said()[-1] == "c", "from now on at once"


def test_an_end_at_the_end_of_serving_may_submit_more(serving: Bench) -> None:
    serving.thread.submit(serving.working("a"), lambda _: serving.submit("b"))
    serving.thread.end_serving()
    assert serving.log == ["a", "b"]
    assert serving.said() == ["b"]


def test_it_may_serve_again(serving: Bench) -> None:
    serving.submit("a")
    serving.thread.end_serving()
    serving.serve()
    serving.submit("b")
    serving.run_all()
    assert serving.said() == ["a", "b"]


def test_what_is_abandoned_is_not_waited_for_and_follows_nothing(serving: Bench) -> None:
    serving.hold()
    serving.submit("a", "b")
    serving.thread.abandon()
    assert (serving.thread.is_serving, serving.thread.pending) == (False, 0)
    serving.thread.end_serving()
    serving.loop.run()
    assert serving.said() == []
    serving.submit("c")
    assert serving.said() == ["c"]


def test_what_waits_when_it_is_abandoned_is_never_done(serving: Bench) -> None:
    """It has numbers of descriptors, which others may have by then."""
    serving.hold()
    serving.submit("a")
    reached = threading.Event()
    serving.thread.submit(reached.set)
    serving.thread.abandon()
    serving.may_go_on.set()
    assert not reached.wait(1.0)
    assert serving.log == []


def threads_named(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def test_what_is_gathered_is_handed_over_when_it_is_much() -> None:
    """The tick, which hands over the rest, may be a while away."""
    thread = DeviceThread("kvfs-gathering", lambda: None, gathers=True)
    thread.begin_serving(FakeLoop())
    for _ in range(15):
        thread.submit(lambda: None)
    assert threads_named("kvfs-gathering") == 0
    thread.submit(lambda: None)
    assert threads_named("kvfs-gathering") == 1
    thread.end_serving()


def test_so_many_threads_fetch_what_requests_lack() -> None:
    """All of them may be stuck, with a device that says nothing."""
    before = threads_named("kvfs-asks")
    threads = DriveThreads(lambda: None, io_threads=1)
    threads.asks.begin_serving(FakeLoop())
    may_go_on = threading.Event()
    for _ in range(20):
        threads.asks.submit(lambda: may_go_on.wait(WAIT_S))
    assert threads_named("kvfs-asks") - before == 8
    may_go_on.set()
    threads.asks.end_serving()
