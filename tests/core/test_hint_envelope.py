"""What an envelope of hints asks for: the page's own, bounds, and that none is an error."""

import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.bridges.envelope import (
    ACTIONS_MAX,
    DIRECTIVES_MAX,
    FETCHED_MAX,
    BlockWish,
    Directive,
    RequestHints,
    hints_of,
)
from kvfs.core.hints import Do
from tests.support.mounts.mounting import ROOT


def envelope(*actions: object, version: object = "0.1") -> dict[str, Any]:
    return {"protocol_version": version, "message_id": "m", "actions": list(actions)}


def action(kind: str, version: object = "1.0", **payload: object) -> dict[str, Any]:
    return {"action_id": "a", "action_type": kind, "action_version": version, "payload": payload}


def retain(*directives: object) -> dict[str, Any]:
    return action("kv.retain", scope=None, directives=list(directives))


def test_the_envelope_of_the_page() -> None:
    page = (ROOT / "docs" / "hints.md").read_text()
    (shown,) = re.findall(r"^```json\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    hints = hints_of(json.loads(shown))
    assert hints.unknown == 0
    assert hints.directives == (Directive(80, 0, 2048, 60),)
    assert hints.once
    assert len(hints.fetched) == 2
    assert hints.wish_for(2048, 4096) == BlockWish(Do.RETAIN, 80, 60)
    assert hints.wish_for(2064, 4096) == BlockWish(Do.DEMOTE)


@pytest.mark.parametrize(
    ("end_token", "wish"),
    [
        (16, BlockWish(Do.RETAIN, 80, 60)),
        (32, BlockWish(Do.RETAIN, 80, 60)),
        (48, BlockWish(Do.RETAIN, 30)),
        (64, None),
        (96, BlockWish(Do.RELEASE)),
        (112, BlockWish(Do.RETAIN, 10)),
    ],
)
def test_a_block_is_covered_by_the_range_that_it_ends_in(
    end_token: int, wish: BlockWish | None
) -> None:
    hints = hints_of(
        envelope(
            retain(
                {"end": 32, "priority": 80, "duration": 60},
                {"start": 16, "end": 48, "priority": 30},
                {"start": 80, "priority": 0},
            ),
            retain({"covers_output": True, "priority": 10}),
        )
    )
    assert hints.unknown == 0
    assert hints.wish_for(end_token, prompt_tokens=96) == wish


def test_an_engines_object_is_read_like_a_dict() -> None:
    class Held:
        """As msgspec's: attributes, and the payload a dict."""

        def __init__(self, said: dict[str, Any]) -> None:
            vars(self).update(said)

    said = envelope(action("kv.deref"), retain({"priority": 1}))
    held = Held({**said, "actions": [Held(one) for one in said["actions"]]})
    assert hints_of(held) == hints_of(said) == RequestHints((Directive(1),), once=True)


def test_hashes_are_read_whatever_their_sign() -> None:
    hints = hints_of(envelope(action("kv.fetch", block_hashes=[1, -1, (1 << 64) - 1])))
    assert hints.fetched == {1, (1 << 64) - 1}


@pytest.mark.parametrize(
    "unread",
    [
        action("kv.retain", "2.0", directives=[]),
        action("kv.prefetch"),
        action("vllm.set_priority"),
        action("kv.retain"),
        action("kv.deref", session="s"),
        action("kv.fetch", block_hashes="all"),
        action("kv.fetch", block_hashes=[1.5, "x"]),
        retain({"priority": 101}),
        retain({"priority": True}),
        retain({"priority": -1}),
        retain({"start": 16, "end": 16, "priority": 1}),
        retain({"priority": 1, "duration": math.inf}),
        retain({"priority": 1, "covers_output": True, "start": 0}),
        retain("all"),
        "not an action",
    ],
)
def test_what_is_not_known_is_counted_and_the_rest_counts(unread: object) -> None:
    hints = hints_of(envelope(unread, action("kv.deref")))
    assert hints == RequestHints(once=True, unknown=1)


@pytest.mark.parametrize("said", [None, 1, [], {}, envelope(version="1.0"), envelope(version=None)])
def test_an_envelope_of_another_kind_says_nothing(said: object) -> None:
    assert hints_of(said) == RequestHints(unknown=1)


def test_a_flood_of_hints_is_bounded() -> None:
    many = hints_of(envelope(*[action("kv.deref")] * (ACTIONS_MAX + 3)))
    assert many == RequestHints(once=True, unknown=3)
    long = retain(*[{"priority": 1}] * (DIRECTIVES_MAX + 5))
    assert len(hints_of(envelope(long, long)).directives) == DIRECTIVES_MAX
    wanted = hints_of(envelope(action("kv.fetch", block_hashes=list(range(FETCHED_MAX + 9)))))
    assert len(wanted.fetched) == FETCHED_MAX


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
ANY_ACTION = st.builds(
    lambda kind, version, payload: {**action(kind, version), "payload": payload},
    st.sampled_from(["kv.retain", "kv.fetch", "kv.deref", "x"]),
    st.sampled_from(["1.0", "1", "2.0", None]),
    JSON | st.fixed_dictionaries({"directives": st.lists(JSON)} | {"block_hashes": st.lists(JSON)}),
)


@given(JSON | st.lists(ANY_ACTION | JSON).map(lambda actions: envelope(*actions)))
def test_no_envelope_is_an_error(said: object) -> None:
    hints = hints_of(said)
    for end_token in (16, 4096):
        wish = hints.wish_for(end_token, 1024)
        assert wish is None or 0 <= wish.priority <= 100
