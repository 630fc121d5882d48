"""The life of a block, walked: the table is total, sane, and what docs/dev/block-life.md draws."""

import copy
import itertools
from typing import Final

import pytest

from kvfs.core.lifecycle import (
    FINAL,
    HELD,
    HIDEABLE,
    IDENTIFIED,
    SETTLED,
    SLABS,
    TABLE,
    UNFINISHED,
    Event,
    Goes,
    IllegalEvent,
    Seen,
    State,
    after,
    is_temporary,
    label,
)
from tests.support.rules.life_drawing import LIFE

PAIRS: Final = list(itertools.product(TABLE, Event))
#: Open for writing: these and nothing else may be, and nothing of them may be evicted.
IN_WRITING: Final = UNFINISHED | {State.REWRITE, State.RENAMED, State.TORN}


def reachable(start: State) -> set[State]:
    found, waiting = {start}, [start]
    while waiting:
        for target in TABLE[waiting.pop()].on.values():
            if target not in found:
                found.add(target)
                waiting.append(target)
    return found


# ---- total ----


def test_every_state_of_a_block_has_a_row() -> None:
    assert set(TABLE) == set(State) - {State.NODE, State.ALIAS}


@pytest.mark.parametrize(("state", "event"), PAIRS, ids=lambda part: part.name)
def test_every_event_leads_to_a_state_or_is_refused(state: State, event: Event) -> None:
    before = copy.deepcopy(TABLE)
    if event in TABLE[state].on:
        assert after(state, event) in TABLE
    else:
        with pytest.raises(IllegalEvent, match=f"{event.name} in {state.name}"):
            after(state, event)
    assert before == TABLE


def test_a_node_has_no_life() -> None:
    for event in Event:
        with pytest.raises(IllegalEvent):
            after(State.NODE, event)


# ---- sane ----


def test_every_state_is_reached_from_a_ready_extent() -> None:
    """ORPHAN is what a leased block under a temporary name becomes, which a name decides."""
    assert reachable(State.READY) == set(TABLE) - {State.ORPHAN}


@pytest.mark.parametrize("state", TABLE, ids=lambda state: state.name)
def test_every_block_ends_and_stays_gone(state: State) -> None:
    assert after(state, Event.REMOVE) is State.GONE
    assert reachable(State.GONE) == {State.GONE}
    assert not any(target is State.READY for target in TABLE[state].on.values())


def test_what_nobody_may_see_has_no_name() -> None:
    nameless = {state for state, row in TABLE.items() if row.seen is Seen.NOBODY}
    assert nameless == {State.READY, State.GONE}


def test_only_what_is_not_whole_yet_can_be_hidden() -> None:
    hidden = {state for state, row in TABLE.items() if row.seen is Seen.BY_POLICY}
    assert hidden == UNFINISHED | {State.TORN}
    always = {state for state, row in TABLE.items() if row.seen is Seen.OWNER}
    assert always == {State.UNRENAMED} == HIDEABLE - UNFINISHED


def test_what_is_written_or_belongs_to_somebody_is_never_evicted() -> None:
    for state in IN_WRITING | HELD | {State.GONE}:
        assert TABLE[state].goes is Goes.NEVER, state.name
    evictable = {state for state, row in TABLE.items() if row.goes is not Goes.NEVER}
    assert evictable == {State.READY, State.PUBLISHED, State.ORPHAN_SLAB, State.ORPHAN}
    assert TABLE[State.ORPHAN].goes < TABLE[State.PUBLISHED].goes < TABLE[State.ORPHAN_SLAB].goes


def test_a_close_ends_all_writing() -> None:
    for state in TABLE.keys() - {State.GONE}:
        closed = TABLE[state].on.get(Event.CLOSE)
        assert (closed is not None) == (state in IN_WRITING | {State.SLAB}), state.name
        assert closed is None or closed in SETTLED | {State.GONE}


def test_what_is_torn_only_goes() -> None:
    assert set(TABLE[State.TORN].on.values()) == {State.TORN, State.GONE}
    assert after(State.TORN, Event.CLOSE) is State.GONE
    for state in IN_WRITING:
        assert after(state, Event.TEAR) is State.TORN


def test_a_dead_maker_holds_nothing() -> None:
    for state in TABLE:
        ended = TABLE[state].on.get(Event.MAKER_DIED)
        assert ended not in HELD, state.name


def test_what_is_closed_and_found_by_all_says_what_it_is() -> None:
    """Not what is being written, nor what only its maker finds, who ends with the power."""
    assert SETTLED - {State.UNRENAMED} == IDENTIFIED
    assert FINAL == IDENTIFIED - SLABS
    assert after(State.REWRITE, Event.CLOSE) not in FINAL


def test_the_sets_agree_with_each_other() -> None:
    stored = SETTLED | (IN_WRITING - {State.TORN})
    others = {State.NODE, State.ALIAS, State.TORN, State.READY, State.GONE}
    assert stored == frozenset(State) - others
    assert HELD < SETTLED
    assert {state: state.value for state in stored | {State.NODE, State.ALIAS}} == {
        State.NODE: 0, State.DRAFT: 1, State.PUBLISHED: 2, State.SLAB: 3, State.REWRITE: 4,
        State.LEASED: 5, State.SLAB_DRAFT: 6, State.ORPHAN_SLAB: 7, State.ORPHAN: 8,
        State.REWRITTEN: 12, State.RENAMED: 13, State.UNRENAMED: 14,
        State.ALIAS: 15,
    }  # fmt: skip


def test_users_read_the_states_of_the_documentation() -> None:
    assert {label(state) for state in TABLE} == {
        "ready", "draft", "slab_draft", "torn", "leased", "published", "rewrite", "slab",
        "orphan_slab", "orphan", "gone",
    }  # fmt: skip


# ---- names of connectors ----

KEY: Final = b"model@1@0@" + b"0123456789abcdef" * 4


@pytest.mark.parametrize(
    "name",
    [
        KEY + b".tmp",  # LMCache fs, UCM
        KEY + b".bin_4be1.tmp",  # vLLM, llm-d
        b".0b54b30e5b4d43c1b8e9a1c0e6a7f7aa.tmp",  # SGLang
        KEY + b".tmp.0b54b30e5b4d43c1b8e9a1c0e6a7f7aa",  # LMCache NIXL dynamic
        KEY + b".tmp01234567",  # LMCache GDS
        b".o_direct_probe_7.tmp",
        b"a.tmp",
        b".tmp1",
    ],
)
def test_a_temporary_name_is_known(name: bytes) -> None:
    assert is_temporary(name)


@pytest.mark.parametrize(
    "name",
    [
        KEY + b".data",
        KEY + b".pt",
        KEY + b".bin",
        KEY + b".safetensors",
        b"kv_cache.data",
        b"obj_0_12ab.bin",
        b"1.bucket",
        b"tmp",
        b"tmp.data",
        b".tmp",  # a directory's usual name
        b"a.tmp" + b"x" * 41,
        b"",
    ],
)
def test_a_final_name_is_known(name: bytes) -> None:
    assert not is_temporary(name)


# ---- drawn ----


def test_the_document_draws_the_table() -> None:
    """If not: python -m tests.support.rules.life_drawing."""
    assert LIFE.shown() == LIFE.make()
