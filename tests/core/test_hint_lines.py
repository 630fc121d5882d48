"""Lines of the hints socket: what they say, what is clipped, and that none is an error."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.core.hints import DURATION_MAX_S, PRIORITY_USUAL, Do, HintBatch, ToldHint, batch_of


def line(*hints: object, **more: object) -> bytes:
    return json.dumps({"hints": list(hints), **more}).encode()


def test_a_line_says_what_it_says() -> None:
    batch = batch_of(
        line(
            {"do": "retain", "names": ["/a", "b/c"], "priority": 80, "duration_s": 60},
            {"do": "demote", "prefixes": ["/d/"]},
            {"do": "fetch", "names": []},
            {"do": "release", "sessions": ["s"]},
            id=7,
        )
    )
    assert batch == HintBatch(
        (
            ToldHint(Do.RETAIN, ("/a", "b/c"), priority=80, duration_s=60.0),
            ToldHint(Do.DEMOTE, prefixes=("/d/",), priority=PRIORITY_USUAL),
            ToldHint(Do.FETCH),
            ToldHint(Do.RELEASE, sessions=("s",)),
        ),
        7,
    )


@pytest.mark.parametrize(
    ("said", "priority", "duration_s", "clipped"),
    [
        ({"priority": 500}, 100, None, 1),
        ({"priority": 10**400}, 100, None, 1),
        ({"priority": 12.4, "duration_s": 1e300}, 12, DURATION_MAX_S, 1),
        ({"priority": float("inf"), "duration_s": float("inf")}, 100, DURATION_MAX_S, 2),
    ],
)
def test_what_is_out_of_bounds_is_clipped(
    said: dict[str, Any], priority: int, duration_s: float | None, clipped: int
) -> None:
    batch = batch_of(line({"do": "retain", **said}))
    assert batch.clipped == clipped
    assert [(one.priority, one.duration_s) for one in batch.hints] == [(priority, duration_s)]


def test_priority_0_favours_nothing() -> None:
    batch = batch_of(line({"do": "retain", "priority": -3}))
    assert (batch.hints[0].do, batch.clipped) == (Do.RELEASE, 1)


@pytest.mark.parametrize(
    "said",
    [
        *(b"", b"\xff", b"[]", b"{}", b'{"hints": 5}', b"[" * 100_000, b'{"hints": [5]}'),
        line({"do": "keep"}),
        line({"do": "retain", "prority": 5}),
        line({"do": "retain", "names": "/a"}),
        line({"do": "retain", "names": [5]}),
        line({"do": "retain", "priority": True}),
        line({"do": "retain", "priority": "80"}),
        line({"do": "retain", "duration_s": 0}),
        line({"do": "retain", "duration_s": float("nan")}),
    ],
)
def test_what_says_nothing_known_is_counted(said: bytes) -> None:
    assert batch_of(said) == HintBatch(unknown=1)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
HINTS = st.dictionaries(
    st.sampled_from(["do", "names", "prefixes", "sessions", "priority", "duration_s"]),
    VALUES | st.sampled_from(["retain", "demote", "fetch", "release"]),
)


@given(st.lists(HINTS | VALUES), VALUES)
def test_nothing_that_is_sent_raises(hints: list[object], named: object) -> None:
    batch = batch_of(json.dumps({"hints": hints, "id": named}).encode())
    assert len(batch.hints) + batch.unknown == len(hints)
