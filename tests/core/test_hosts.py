"""Hosts that serve a trace together: what docs/shared.md says they find, and by what rule."""

import re
from typing import Final

import pytest

from kvfs.bench.replay.trace import Request, read_trace
from tests.bench.measure_hosts import HOSTS, by_prefix, by_turns, found, measure
from tests.support.rules.source_tree import ROOT
from tests.support.store.trace import TRACE

ROW: Final = re.compile(
    r"^\| (\d+ %) \| by (turns|prefix) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE
)


def test_the_page_says_what_is_calculated() -> None:
    measured = measure(read_trace(str(TRACE), None), HOSTS)
    rows = ROW.findall((ROOT / "docs" / "shared.md").read_text())
    assert len(rows) == 2 * len(measured)
    for share, router, *told in rows:
        parts = measured[share][f"by_{router}"].values()
        assert list(map(float, told)) == pytest.approx([100 * part for part in parts], abs=0.051)


def requests(*prompts: tuple[int, ...]) -> list[Request]:
    return [Request(float(at), 1, blocks) for at, blocks in enumerate(prompts)]


def test_a_router_that_knows_prefixes_sends_a_prompt_where_its_head_is() -> None:
    asked = requests((1, 2), (3, 4), (3, 4, 5), (1, 2, 6))
    router = by_prefix(2)
    assert [router(request) for request in asked] == [0, 1, 1, 0]


def test_a_busy_host_gets_no_further_prompt() -> None:
    router = by_prefix(2)
    hosts = [router(request) for request in requests(*[(1, 2)] * 6)]
    assert set(hosts) == {0, 1}


def test_peers_have_what_the_host_lacks_and_the_store_what_all_lost() -> None:
    asked = requests((1, 2), (1, 2), (3, 4), (5, 6), (1, 2))
    told = found(asked, by_turns(2), hosts=2, room=2)
    # The second prompt is at the other host; the last one was lost by both.
    assert told == {"own": 0.0, "and_peers": 0.2, "and_ever_stored": 0.4}
