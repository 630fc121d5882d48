"""Loads race with all that takes a block from under them: rewrites, unlinks, evictions.

No load may get a block that was replaced before its open, and no handle may stay in the server. It
is not killed here (test_server_kills.py), so what answers the opens does so all the time.
"""

import json
from typing import Final

import pytest

from tests.support.kills.server_kills import load_of, steady_load
from tests.support.mounts.mounting import kernel_has_passthrough, skip_without_mounts

pytestmark = [pytest.mark.needs_fuse, pytest.mark.needs_loop]

#: Four only load and list; two of each of the others change what these load.
KINDS: Final = (
    *("loads", "loads", "loads", "looks"),
    *("renames", "truncates", "in_place", "evicts") * 2,
)
#: What must have been done, each often.
DONE: Final = (
    *("loads", "misses", "rewrite", "truncate", "rename_over", "unlink", "evict", "store_in_place"),
    *("kept", "look"),
)
PROOF_S: Final = 300.0


def race(path: str, room: str, seconds: float, opens: int, *, compiled: bool) -> None:
    """Let them race for so long, and until there were so many opens; print what happened."""
    skip_without_mounts()
    if path == "passthrough" and not kernel_has_passthrough():
        pytest.skip("this kernel has no FUSE passthrough")
    soak = load_of(path, room, "drive", most_s=1.0, kinds=KINDS)
    flags = () if compiled else ("--set=compiled_reader=false",)
    with steady_load(soak, KINDS, pause_s=0.001, flags=flags) as driver:
        status = driver.mounted.status()
        assert status["request_reader"] == ("compiled" if compiled else "python")
        driver.watch(seconds)
        while driver.mounted.status()["requests"].get("OPEN", 0) < opens:
            driver.watch(1.0)
    report = {**driver.report(), "request_reader": status["request_reader"]}
    print(json.dumps(report))
    assert min(report["done"].get(what, 0) for what in DONE) > 0, report


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "python"])
def test_a_few_seconds(*, compiled: bool) -> None:
    """[life-rewrite] Both readers of requests, in a full pool."""
    race("passthrough", "full", 2.0, 1000, compiled=compiled)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("path", "room"), [("passthrough", "full"), ("passthrough", "roomy"), ("daemon", "full")]
)
def test_five_minutes(path: str, room: str) -> None:
    """[life-rewrite] Eviction, unlink and rewrite against loads that never pause."""
    race(path, room, PROOF_S, 10_000, compiled=True)
