"""Work beside the requests: in order, bounded, identities once, and no failure gets out."""

import threading
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from kvfs.core.drives import Numbering
from kvfs.core.errors import NoSpace
from kvfs.core.types import FIRST_INODE, DriveNo, InodeNo
from kvfs.storage.background import Background, Job
from tests.support.store.fake_loop import FakeLoop

WAIT_S: Final = 60.0


@pytest.fixture
def background() -> Iterator[Background]:
    made = Background(jobs_max=100)
    yield made
    made.stop()


def say(log: list[str], what: str) -> None:
    log.append(what)


def saying(log: list[str], what: str) -> Job:
    return lambda: say(log, what)


def test_jobs_run_in_order_when_there_is_time(background: Background) -> None:
    log: list[str] = []
    background.submit(lambda: say(log, "first"))
    background.submit(lambda: say(log, "second"))
    assert log == []
    assert background.run_one()
    assert log == ["first"]
    assert background.run_one()
    assert not background.run_one()
    assert log == ["first", "second"]


def test_what_has_leisure_runs_when_nothing_else_is_due_and_holds_up_no_stop() -> None:
    background = Background(jobs_max=100)
    log: list[str] = []
    background.submit_leisure(saying(log, "step"))
    background.submit_leisure(saying(log, "next step"))
    background.submit(saying(log, "job"))
    assert background.backlog == 3
    assert background.run_one()
    assert background.run_one()
    assert log == ["job", "step"]
    background.drain()
    background.stop()
    assert log == ["job", "step"]
    assert background.backlog == 1


@pytest.mark.parametrize("error", [NoSpace("no room"), OSError("no device")])
def test_what_has_leisure_and_is_refused_is_done_again_after_a_tick(
    background: Background, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    log: list[str] = []
    refusals = [error, error]

    def step() -> None:
        if refusals:
            raise refusals.pop()
        log.append("step")

    background.submit_leisure(step)
    for _ in range(2):
        assert background.run_one()
        assert not background.run_one()  # not at once
        assert background.backlog == 1
        background.make_due()
    background.work(0.0)
    assert log == ["step"]
    assert background.backlog == 0
    assert caplog.text.count("postponed") == 1
    assert background.failures == 0


def test_above_the_bound_the_caller_does_the_oldest_job() -> None:
    background = Background(jobs_max=2)
    log: list[str] = []
    for number in range(4):
        background.submit(saying(log, str(number)))
    assert log == ["0", "1"]
    assert background.backlog == 2
    background.stop()
    assert log == ["0", "1", "2", "3"]


def test_identities_are_bounded_too() -> None:
    background = Background(jobs_max=2)
    log: list[str] = []
    for number in range(4):
        background.identify(InodeNo(number), saying(log, str(number)))
    assert log == ["0", "1"]
    background.stop()
    assert log == ["0", "1", "2", "3"]


def test_an_identity_waits_for_a_tick_and_is_written_once(background: Background) -> None:
    log: list[str] = []
    background.identify(InodeNo(16), lambda: say(log, "closed"))
    assert not background.run_one()
    background.identify(InodeNo(16), lambda: say(log, "renamed"))
    background.make_due()
    assert background.run_one()
    assert not background.run_one()
    assert log == ["renamed"]


def test_a_later_identity_replaces_one_that_is_due(background: Background) -> None:
    log: list[str] = []
    background.identify(InodeNo(16), lambda: say(log, "old"))
    background.make_due()
    background.identify(InodeNo(16), lambda: say(log, "new"))
    background.drain()
    assert log == ["new"]


@pytest.mark.parametrize("ticks", [0, 1])
def test_what_is_forgotten_is_not_written(background: Background, ticks: int) -> None:
    log: list[str] = []
    background.identify(InodeNo(16), lambda: say(log, "gone"))
    for _ in range(ticks):
        background.make_due()
    background.forget(InodeNo(16))
    background.drain()
    assert log == []


def test_drain_does_identities_that_are_due_and_those_that_are_not(background: Background) -> None:
    log: list[str] = []
    background.identify(InodeNo(16), lambda: say(log, "due"))
    background.make_due()
    background.identify(InodeNo(17), lambda: say(log, "fresh"))
    background.submit(lambda: background.identify(InodeNo(18), lambda: say(log, "late")))
    background.drain()
    assert sorted(log) == ["due", "fresh", "late"]
    assert background.backlog == 0


def test_long_jobs_run_beside_the_caller(background: Background) -> None:
    started, may_end = threading.Event(), threading.Event()
    names: list[str] = []

    def long_job() -> None:
        names.append(threading.current_thread().name)
        started.set()
        assert may_end.wait(10)

    background.submit_long(long_job)
    assert started.wait(10)
    log: list[str] = []
    background.submit(lambda: say(log, "short"))
    assert background.run_one()
    may_end.set()
    background.drain()
    assert (log, names) == (["short"], ["kvfs-long"])


def test_a_long_job_of_one_drive_waits_for_none_of_another() -> None:
    background, answers, done = Background(10, drives=2), threading.Event(), threading.Event()
    there = Numbering(2).inode(DriveNo(1), InodeNo(16))
    background.submit_long(lambda: say(log, str(answers.wait(60))), there)
    log: list[str] = []
    background.submit_long(done.set, InodeNo(16))
    assert done.wait(60)
    assert not log
    answers.set()
    background.drain()
    assert log == ["True"]
    background.stop()


def test_a_long_job_may_order_the_next_one_after_the_end(background: Background) -> None:
    """A sweep does so; a stop does not wait for what it ordered last."""
    log: list[str] = []

    def step() -> None:
        log.append("step")
        background.submit_long(step)

    background.submit_long(step)
    background.stop()
    assert log
    background.stop()


def test_work_ends_with_the_turn_or_the_jobs(background: Background) -> None:
    log: list[str] = []
    for number in range(10):
        background.submit(saying(log, str(number)))
    background.work(0.0)
    assert log == ["0"]
    background.work(60.0)
    assert len(log) == 10


def test_a_failure_is_counted_and_logged_and_stops_nothing(
    background: Background, caplog: pytest.LogCaptureFixture
) -> None:
    log: list[str] = []

    def fail() -> None:
        raise OSError("the device is gone")

    background.submit(fail)
    background.identify(InodeNo(16), fail)
    background.submit_long(fail)
    background.submit(lambda: say(log, "next"))
    background.submit_long(lambda: say(log, "next long"))
    background.drain()
    assert sorted(log) == ["next", "next long"]
    assert background.failures == 3
    assert "the device is gone" in caplog.text


# ---- while a loop serves ----


class Jobs:
    """Jobs in the background of a loop that serves, with a log of those done."""

    def __init__(self, jobs_max: int = 2, drives: int = 1) -> None:
        self.background = Background(jobs_max, drives=drives)
        self.device = self.background.drives.all[0].device
        self.loop = FakeLoop()
        self.background.begin_serving(self.loop)
        self.log: list[str] = []
        self._may_go_on = threading.Event()

    def say(self, what: str) -> Callable[[], None]:
        """Return a job that logs *what*."""
        return lambda: self.log.append(what)

    def writing(self, what: str) -> Callable[[], None]:
        """Return a job that has the device's thread log *what*."""
        return lambda: self.device.submit(self.say(what))

    def crowd(self) -> None:
        """Let the device answer nothing, with as much to do as makes a crowd."""
        self.device.submit(lambda: self._may_go_on.wait(WAIT_S))
        while not self.device.is_crowded:
            self.device.submit(lambda: None)

    def answer(self) -> None:
        """Let the device answer, until its thread has nothing to do."""
        self._may_go_on.set()
        self.device.hand_over(wakes=True)
        self.loop.run_until(lambda: not self.device.pending, "all is done")

    def stop(self) -> None:
        """End what runs."""
        self._may_go_on.set()
        self.background.end_serving()
        self.background.stop()


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    made = Jobs()
    yield made
    made.stop()


def test_jobs_wait_while_the_device_has_too_much_to_do(jobs: Jobs) -> None:
    jobs.crowd()
    for number in range(5):
        jobs.background.submit(jobs.say(f"job {number}"))
        jobs.background.identify(InodeNo(number), jobs.say(f"identity {number}"))
    jobs.background.make_due()
    assert not jobs.background.run_one()
    jobs.background.work(60.0)
    assert jobs.log == [], "not even beyond the bound"
    jobs.answer()
    assert jobs.background.run_one()
    assert jobs.log == ["job 0"]
    jobs.background.work(60.0)
    assert jobs.log[-1] == "identity 4"
    assert len(jobs.log) == 10


def test_above_the_bound_the_caller_does_the_oldest_job_unless_the_device_is_late(
    jobs: Jobs,
) -> None:
    for number in range(3):
        jobs.background.submit(jobs.say(str(number)))
    assert jobs.log == ["0"]


def test_in_a_hurry_jobs_only_hand_over_what_the_device_has_to_do(jobs: Jobs) -> None:
    jobs.crowd()
    before = jobs.device.pending
    jobs.background.submit(jobs.writing("job"))
    jobs.background.identify(InodeNo(16), jobs.writing("identity"))
    jobs.background.hurry()
    assert jobs.log == []
    assert jobs.device.pending == before + 2
    assert jobs.background.backlog == before + 2
    jobs.answer()
    assert jobs.log == ["job", "identity"]
    assert jobs.background.backlog == 0


# ---- several drives ----


@pytest.fixture
def on_two() -> Iterator[Jobs]:
    made = Jobs(drives=2)
    yield made
    made.stop()


_ON_SECOND = Numbering(2).inode(DriveNo(1), FIRST_INODE)


def test_a_drive_that_does_not_answer_keeps_nothing_of_another_waiting(on_two: Jobs) -> None:
    on_two.crowd()
    threads = on_two.background.of(_ON_SECOND)
    on_two.background.submit(lambda: threads.device.submit(on_two.say("in order")))
    assert on_two.background.run_one(), "its jobs do not wait"
    on_two.background.hurry()
    threads.asks.submit(on_two.say("asked"))
    threads.transfers.submit(on_two.say("moved"))
    on_two.loop.run_until(lambda: len(on_two.log) == 3, "all threads of the second have run")
    assert on_two.device.pending


def test_jobs_wait_while_no_drive_answers(on_two: Jobs) -> None:
    on_two.crowd()
    held, second = threading.Event(), on_two.background.of(_ON_SECOND).device
    second.submit(lambda: held.wait(WAIT_S))
    while not second.is_crowded:
        second.submit(lambda: None)
    on_two.background.submit(on_two.say("job"))
    assert not on_two.background.run_one()
    held.set()
    second.hand_over(wakes=True)
    on_two.loop.run_until(lambda: not second.pending, "the second answers")
    assert on_two.background.run_one()


def test_work_of_all_drives_is_in_the_backlog_and_ended_at_a_stop(on_two: Jobs) -> None:
    for threads in on_two.background.drives.all:
        threads.device.submit(on_two.say("done"))
    assert on_two.background.backlog == 2
    on_two.background.end_serving()
    assert on_two.log == ["done", "done"]
    assert not on_two.background.is_serving


def fail() -> None:
    raise OSError("the device is gone")


def test_a_job_that_fails_on_the_device_is_counted(
    jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    jobs.background.submit(lambda: jobs.device.submit(fail))
    jobs.background.hurry()
    jobs.answer()
    assert jobs.background.failures == 1
    assert "the device is gone" in caplog.text


def test_what_is_discarded_is_neither_waited_for_nor_done(jobs: Jobs) -> None:
    jobs.crowd()
    jobs.background.submit(jobs.say("job"))
    jobs.background.identify(InodeNo(16), jobs.say("identity"))
    jobs.background.discard()
    assert jobs.background.backlog == 0
    jobs.background.hurry()
    assert jobs.log == []
