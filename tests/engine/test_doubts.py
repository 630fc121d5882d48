"""Closes that prove nothing: what vouches for a block, what tears it, and what a stop makes of it.

The processes are the test's own words; tests/fuse/life/test_foreign_clients.py and
test_held_files.py have real ones.
"""

from collections.abc import Iterator
from typing import Final

import pytest

from kvfs.core.errors import NotFound
from kvfs.core.lifecycle import State
from kvfs.core.types import ROOT_INODE
from kvfs.machine.process_ends import Fate
from kvfs.machine.processes import NOBODY, Maker, Question
from tests.support.devices.failing_syscalls import FailingSyscalls
from tests.support.store.driven import Opened
from tests.support.store.driven_faults import set_limit
from tests.support.store.stores import FILE, Host, assert_exact, get, host, settle, write

WRITER: Final = Maker(100, 1)
NAME: Final = b"K"


class Clock:
    """A monotonic clock that the test turns."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fates() -> dict[Maker, Fate | None]:
    """What is answered to a question; None while it is not."""
    return {}


@pytest.fixture
def running(
    clock: Clock, fates: dict[Maker, Fate | None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Host]:
    monkeypatch.setattr(
        "kvfs.machine.processes.Processes.ask", lambda _, maker: Question(fates.get(maker))
    )
    monkeypatch.setattr("kvfs.machine.processes.Processes.of", lambda *_: WRITER)
    with host() as made:
        made.start()
        made.store.turn_clock(clock)
        yield made


def draft(running: Host, name: bytes = NAME, maker: Maker = WRITER) -> Opened:
    opened, _ = running.store.create(ROOT_INODE, name, FILE, 0, 0, maker)
    write(running.store, opened, b"bytes")
    return opened


def close(running: Host, opened: Opened, fate: Fate, tid: int, maker: Maker = WRITER) -> None:
    """Close as *tid* of *maker*, who fares like *fate*, does: what it wrote is unchanged since."""
    store = running.store
    closing = store.last_flush(opened, fate, tid, maker)
    store.close(opened, writer=True, closing=closing)


def state(running: Host, name: bytes = NAME) -> State | None:
    """Return the state of what has *name*, None for a miss."""
    try:
        ino = running.store.lookup(ROOT_INODE, name)
    except NotFound:
        return None
    return State(running.store.record(ino).state)


@pytest.mark.parametrize("fate", [Fate.LIVES, Fate.EXITED])
def test_what_a_living_process_closes_is_whole_at_once(running: Host, fate: Fate) -> None:
    close(running, draft(running), fate, 100)
    assert state(running) is State.LEASED
    assert running.store.doubts() == 0
    assert_exact(running)


@pytest.mark.parametrize(
    ("answer", "becomes"),
    [
        (Fate.LIVES, State.LEASED),
        (Fate.EXITED, State.LEASED),
        (Fate.KILLED, None),
        (None, State.DRAFT),
        (Fate.UNKNOWN, State.DRAFT),
    ],
)
def test_a_close_that_could_not_be_looked_at_waits_for_the_answer(
    running: Host, fates: dict[Maker, Fate | None], answer: Fate | None, becomes: State | None
) -> None:
    """No descriptor was left at the FLUSH; an answer that never comes, or says nothing, tears."""
    fates[WRITER] = answer
    close(running, draft(running), Fate.UNKNOWN, 100, NOBODY)
    assert state(running) is State.DRAFT
    running.store.settle_closes()
    assert state(running) is becomes
    assert_exact(running)


@pytest.mark.parametrize("answer", [None, Fate.UNKNOWN])
def test_what_nobody_vouches_for_in_time_is_torn(
    running: Host, fates: dict[Maker, Fate | None], clock: Clock, answer: Fate | None
) -> None:
    fates[WRITER] = answer
    close(running, draft(running), Fate.UNKNOWN, 100)
    clock.now_s += 4.9
    running.store.tick()
    assert state(running) is State.DRAFT
    clock.now_s += 0.2
    running.store.tick()
    assert state(running) is None
    assert running.store.describe()["unverified_blocks"] == 1
    settle(running.store)
    assert_exact(running)


def test_a_rename_vouches_for_it(running: Host, clock: Clock) -> None:
    close(running, draft(running, maker=NOBODY), Fate.UNKNOWN, 0, NOBODY)
    running.store.rename(ROOT_INODE, NAME, ROOT_INODE, b"final", replace=True)
    running.store.tick()
    assert state(running, b"final") is State.PUBLISHED
    clock.now_s += 60
    running.store.tick()
    assert get(running.store, ROOT_INODE, b"final") == b"bytes"
    assert_exact(running)


def test_what_is_written_behind_its_last_close_is_in_doubt(
    running: Host, fates: dict[Maker, Fate | None]
) -> None:
    """A mapping, or a ring that still writes: who closed lived, and was killed later."""
    opened = draft(running)
    before = running.store.last_flush(opened, Fate.LIVES, 100, WRITER)
    write(running.store, opened, b"and half", 5)
    fates[WRITER] = Fate.KILLED
    running.store.close(opened, writer=True, closing=before)
    running.store.tick()
    assert state(running) is None


def test_what_is_held_open_behind_its_last_close_is_in_doubt(
    running: Host, fates: dict[Maker, Fate | None], clock: Clock
) -> None:
    """Nothing was written since: requests that never began."""
    opened = draft(running)
    closing = running.store.last_flush(opened, Fate.LIVES, 100, WRITER)
    clock.now_s += 1
    fates[WRITER] = Fate.KILLED
    running.store.close(opened, writer=True, closing=closing)
    running.store.tick()
    assert state(running) is None


def test_a_thread_of_the_kernel_is_not_doubted(running: Host, clock: Clock) -> None:
    """Nfsd closes some time after its last write, and no signal cuts that."""
    opened = draft(running, maker=NOBODY)
    closing = running.store.last_flush(None, Fate.LIVES, 2, NOBODY, at_s=clock() - 30)
    running.store.close(opened, writer=True, closing=closing)
    assert state(running) is State.LEASED


def test_a_device_that_cannot_be_asked_leaves_a_doubt(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of fstat at the close is not "nothing was written"."""
    failing = FailingSyscalls(["fstat"])
    with host() as made:
        store = made.start(failing)
        store.turn_clock(clock)
        opened = draft(made)
        closing = store.last_flush(opened, Fate.LIVES, 0, WRITER)
        failing.calls, failing.fail_at = 0, 1
        store.close(opened, writer=True, closing=closing)
        assert failing.failed
        assert store.doubts() == 1
        assert state(made) is State.DRAFT
    assert "Input/output error" in caplog.text


@pytest.mark.parametrize(
    ("answer", "becomes"), [(Fate.LIVES, True), (Fate.UNKNOWN, False), (None, False)]
)
def test_a_stop_publishes_what_is_vouched_for_and_no_more(
    running: Host, fates: dict[Maker, Fate | None], answer: Fate | None, becomes: bool
) -> None:
    fates[WRITER] = answer
    close(running, draft(running), Fate.UNKNOWN, 100)
    running.stop(all_closed=True)
    running.start()
    assert (state(running) is not None) is becomes


def test_another_writer_may_still_come_and_finish(
    running: Host, fates: dict[Maker, Fate | None], clock: Clock
) -> None:
    """The wait ends when the last of them has closed."""
    fates[WRITER] = Fate.UNKNOWN
    opened = draft(running)
    close(running, opened, Fate.UNKNOWN, 100)
    again = running.store.open(opened.ino, writer=True, truncate=False, maker=WRITER)
    clock.now_s += 60
    running.store.tick()
    assert state(running) is State.DRAFT
    close(running, again, Fate.LIVES, 100)
    running.store.tick()
    assert state(running) is None, "the first close is as unknown as before"
    assert_exact(running)


def test_of_too_many_doubts_the_oldest_is_torn(
    running: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limit(monkeypatch, "doubts", 3)
    for name in (b"0", b"1", b"2", b"3"):
        close(running, draft(running, name), Fate.UNKNOWN, 100)
    assert [state(running, name) for name in (b"0", b"1", b"2", b"3")] == [None, *3 * [State.DRAFT]]
    assert running.store.doubts() == 3
    assert_exact(running)


def test_of_many_processes_a_few_at_a_time_are_asked_for(
    running: Host, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in a thread, and a process may hang in its end."""
    asked: list[Question] = []

    def ask(*_: object) -> Question:
        asked.append(Question(None))
        return asked[-1]

    monkeypatch.setattr("kvfs.machine.processes.Processes.ask", ask)
    for number in range(20):
        close(running, draft(running, b"%d" % number), Fate.UNKNOWN, 100)
    running.store.tick()
    assert len(asked) == 8
    clock.now_s += 60
    running.store.tick()
    settle(running.store)
    assert_exact(running)
