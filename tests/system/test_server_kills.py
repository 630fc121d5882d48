"""Clients of every kind at work on a mount whose server is killed again and again: none notices.

Each call must succeed, every byte must be right, and what was acknowledged must be there, at the
end and after a clean stop and start, too. The kills follow from the seed (``KVFS_KILLS_SEED``).
"""

import json
from typing import Any, Final

import pytest

from tests.support.kills.server_kills import load_of, skip_without_takeover, steady_load
from tests.support.kills.soak.soak import Soak
from tests.support.mounts.modes import GATE, in_memory
from tests.support.mounts.mounting import skip_without_mounts

pytestmark = [pytest.mark.needs_fuse, pytest.mark.needs_loop]

#: What clients must have done, each of them often.
DONE: Final = (
    *("acknowledged", "store", "store_in_place", "store_mapped", "rewrite", "truncate", "loads"),
    *("write_slowly", "kept", "look", "lists", "change_names", "evict", "lock", "rename_over"),
    *("append", "list_many"),
)


#: In a full pool a clean stop may take what is in memory.
MODES: Final = {"lru": (), "gate": GATE, "memory": in_memory(24 << 20)}


def kill_servers(soak: Soak, kills: int, *, pause_s: float, mode: str) -> dict[str, Any]:
    """Kill so many servers under the load; return and print what happened."""
    skip_without_mounts()
    with steady_load(soak, pause_s=pause_s, flags=MODES[mode]) as driver:
        skip_without_takeover(driver.mounted)
        for _ in range(kills):
            driver.watch(driver.random.uniform(soak.least_s, soak.most_s))
            driver.next_kill()
        assert driver.mounted.status()["restarts"] >= kills
        probation = driver.mounted.status()["probation"]
    report = {**driver.report(), "mode": mode, "probation": probation}
    print(json.dumps(report))
    assert report["kills"] == kills
    return report


@pytest.mark.parametrize(
    ("path", "room", "source", "mode", "kills"),
    [
        ("passthrough", "full", "drive", "lru", 20),
        ("passthrough", "full", "directory", "memory", 6),
        ("daemon", "roomy", "directory", "gate", 6),
    ],
)
def test_a_few_kills(path: str, room: str, source: str, mode: str, kills: int) -> None:
    """[taken-over] No call of eleven clients fails."""
    report = kill_servers(load_of(path, room, source, most_s=0.6), kills, pause_s=0.04, mode=mode)
    assert report["done"]["acknowledged"] > kills, report


@pytest.mark.proof
@pytest.mark.parametrize(
    ("path", "room", "source", "mode"),
    [
        ("passthrough", "roomy", "drive", "gate"),
        ("passthrough", "full", "drive", "lru"),
        ("passthrough", "full", "directory", "memory"),
        ("daemon", "full", "directory", "lru"),
    ],
)
def test_two_hundred_kills(path: str, room: str, source: str, mode: str) -> None:
    """[taken-over] A fifth of them inside a create, a rename or a release."""
    report = kill_servers(load_of(path, room, source, most_s=1.5), 200, pause_s=0.01, mode=mode)
    assert min(report["done"].get(what, 0) for what in DONE) > 0, report
    inside = sum(hits for how, hits in report["hit"].items() if ": " in how)
    assert inside >= report["kills"] / 5, report
