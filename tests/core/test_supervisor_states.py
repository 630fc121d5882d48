"""What a supervisor does: the table is total, drawn, and keeps its promises."""

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mount.supervisor.states import TABLE, Act, Course, MountEvent, MountState
from tests.support.rules.supervisor_drawing import DRAWING

#: In these there is a server process.
WITH_SERVER: Final = {
    MountState.BEGINS,
    MountState.BEGINS_TO_STOP,
    MountState.SERVES,
    MountState.YIELDS,
    MountState.STOPS,
    MountState.RETURNS,
    MountState.RETURNS_TO_STOP,
    MountState.LEAVES,
}
TO_STOP: Final = {
    MountState.BEGINS_TO_STOP,
    MountState.STOPS,
    MountState.WAITS_TO_STOP,
    MountState.RETURNS_TO_STOP,
    MountState.LEAVES,
}
TO_THE_SERVER: Final = {
    Act.HAND_ON,
    Act.KILL,
    Act.REPLACE,
    Act.SERVE,
    Act.SERVE_TO_STOP,
    Act.LET_GO,
}
ENDS: Final = {Act.END, Act.END_DEAD, Act.GIVE_UP, Act.QUIT}
each_step = pytest.mark.parametrize(
    ("state", "event"), [(state, event) for state in MountState for event in MountEvent]
)


@each_step
def test_every_state_has_an_answer_to_every_event(state: MountState, event: MountEvent) -> None:
    to, act = TABLE[state][event]
    assert (to is MountState.OVER) == (act in ENDS or state is MountState.OVER)


@each_step
def test_only_a_server_that_is_there_is_told_anything(state: MountState, event: MountEvent) -> None:
    _, act = TABLE[state][event]
    assert act not in TO_THE_SERVER or state in WITH_SERVER


@each_step
def test_a_server_comes_by_its_birth_and_goes_by_its_death(
    state: MountState, event: MountEvent
) -> None:
    to, _ = TABLE[state][event]
    if to is state or to is MountState.OVER:
        return
    if event is MountEvent.BORN:
        assert (state in WITH_SERVER, to in WITH_SERVER) == (False, True)
    elif event in (MountEvent.DIED, MountEvent.DIED_ALONE):
        assert (state in WITH_SERVER, to in WITH_SERVER) == (True, False)
    else:
        assert (state in WITH_SERVER) == (to in WITH_SERVER)


@each_step
def test_a_death_always_goes_on(state: MountState, event: MountEvent) -> None:
    """A state that kept waiting for a dead server would keep its callers for ever."""
    if state in WITH_SERVER and event in (MountEvent.DIED, MountEvent.DIED_ALONE):
        assert TABLE[state][event].to not in WITH_SERVER


@pytest.mark.parametrize("state", sorted(TO_STOP))
@pytest.mark.parametrize("event", MountEvent)
def test_a_stop_is_never_forgotten(state: MountState, event: MountEvent) -> None:
    assert TABLE[state][event].to in TO_STOP | {MountState.OVER}


@given(st.booleans(), st.lists(st.sampled_from(MountEvent)))
def test_a_course_follows_the_table(has_mount: bool, events: list[MountEvent]) -> None:
    course = Course(has_mount=has_mount)
    for event in events:
        before = course.state
        act = course.act_for(event)
        assert TABLE[before][event] == (course.state, act)
        assert course.is_over == (course.state is MountState.OVER)
        assert sum((course.wants_server, course.is_served, course.is_awaited)) <= 1
        assert course.wants_server == (course.state not in WITH_SERVER and not course.is_over)


def test_every_state_is_reached() -> None:
    reached = {MountState.NO_MOUNT, MountState.WAITS}
    for _ in MountState:
        reached |= {step.to for state in reached for step in TABLE[state].values()}
    assert reached == set(MountState)


def test_the_document_draws_the_table() -> None:
    """If not: python -m tests.support.rules.supervisor_drawing."""
    assert DRAWING.shown() == DRAWING.make()
