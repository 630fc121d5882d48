"""The flags of an open block, walked: what its last close makes of each combination."""

import ast
import inspect
import itertools
from pathlib import Path

import pytest

import kvfs
import mount
from kvfs.core.lifecycle import (
    FINAL,
    SETTLED,
    TABLE,
    UNFINISHED,
    Event,
    IllegalEvent,
    State,
    after,
)
from kvfs.core.writing import LAST_CLOSE, Left, Writing
from tests.support.rules.life_drawing import EVENTS, FLAGS, WRITING

#: What the index may say of a block at its last close.
STORED = SETTLED | UNFINISHED | {State.REWRITE, State.RENAMED}


def expected(one: Writing, state: State, *, written: bool) -> State:
    """The same answer in other words."""
    died = one.torn and (written or one.outlives or state in UNFINISHED)
    if died and state in UNFINISHED | {State.REWRITE, State.RENAMED}:
        return State.GONE
    if state is State.REWRITE and not written:
        state = one.before
    elif state is State.REWRITE:
        adds = one.appended_only and one.before in FINAL
        state = State.LEASED if adds else State.REWRITTEN
    elif state in UNFINISHED:
        state = State.LEASED if state is State.DRAFT else State.SLAB
    elif state is State.RENAMED:
        state = State.PUBLISHED
    return State.PUBLISHED if one.renamed else state


@pytest.mark.parametrize("state", sorted(STORED), ids=lambda state: state.name)
def test_what_each_combination_of_flags_comes_to(state: State) -> None:
    befores = SETTLED if state is State.REWRITE else {State.DRAFT}
    bits = itertools.product((False, True), repeat=len(FLAGS) + 1)
    for (written, *flags), before in itertools.product(bits, befores):
        one = Writing()
        one.before = before
        vars(one).update(zip(FLAGS, flags, strict=True))
        became = one.last_close(state, written=written)
        assert became is expected(one, state, written=written), vars(one)
        assert became in SETTLED | {State.GONE}


def test_the_table_is_total_for_what_is_in_writing() -> None:
    assert set(LAST_CLOSE) == {state for state in STORED if Event.CLOSE in TABLE[state].on}
    for state, row in LAST_CLOSE.items():
        assert set(row) == set(Left)
        for event in row.values():
            if event is not None:
                after(state, event)
            else:
                assert state is State.REWRITE, "else there is no state before"


def test_half_a_block_is_never_shown() -> None:
    for state, row in LAST_CLOSE.items():
        if state is not State.SLAB:  # its bytes are its maker's
            assert row[Left.HALF] is Event.TEAR


def test_no_close_needs_what_the_life_of_a_block_refuses() -> None:
    with pytest.raises(IllegalEvent):
        after(State.PUBLISHED, Event.CLOSE)
    assert Writing().last_close(State.PUBLISHED, written=True) is State.PUBLISHED


def test_flags_are_set_by_the_events_and_by_nothing_else() -> None:
    own = Path(inspect.getfile(Writing))
    roots = (Path(inspect.getfile(package)).parent for package in (kvfs, mount))
    flags = {*FLAGS, "before"}
    setters = [
        f"{path.name}:{node.lineno} sets {node.attr}"
        for root in roots
        for path in root.rglob("*.py")
        if path != own
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if node.attr in flags and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    ]
    assert setters == []


def test_every_event_is_drawn() -> None:
    calls = [call.__code__ for calls in EVENTS.values() for call in calls]
    drawn = {name for code in calls for name in (code.co_name, *code.co_names)}
    events = {name for name in vars(Writing) if inspect.isfunction(vars(Writing)[name])}
    assert {name for name in events - drawn if not name.startswith("_")} == {"last_close", "recall"}


def test_the_document_draws_the_flags() -> None:
    """If not: python -m tests.support.rules.life_drawing."""
    assert WRITING.shown() == WRITING.make()
