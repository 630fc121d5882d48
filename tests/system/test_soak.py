"""Clients at work through kills and stops of the server: nothing wrong or lost, no call hangs.

Every load is checked byte by byte against what its owner has said of the name (soak_table), on
each data path, in a roomy pool and a full one, on a directory and on a drive. A fault tells the
seed, with which the clients choose the same again. ``KVFS_SOAK_SEED`` gives one, and
``KVFS_SOAK_S`` another length in seconds for the proof.
"""

import json
import os
from typing import Any, Final

import pytest

from tests.support.kills.soak.soak import WAYS, Soak, soak_once
from tests.support.mounts.modes import GATE, in_memory
from tests.support.mounts.mounting import kernel_has_passthrough, skip_without_mounts

pytestmark = [pytest.mark.needs_fuse, pytest.mark.needs_loop]

PROOF_S: Final = 60.0
IN_MEMORY_BYTES: Final = 24 << 20
CLIENTS_DO: Final = (
    "store",
    "store_in_place",
    "rewrite",
    "truncate",
    "unlink",
    "rename_over",
    "write_slowly",
    "list_names",
    "attributes",
    "loads",
    "kept",
    "kept_dead",
)


def soak(
    path: str, room: str, source: str, seconds: float, ends: int, *, serves_s: tuple[float, float]
) -> dict[str, Any]:
    """Run one; print and return what it counted.

    At least *ends* servers end. *serves_s*: for how long each server does, at least and at most.
    """
    skip_without_mounts()
    if path == "passthrough" and not kernel_has_passthrough():
        pytest.skip("this kernel has no FUSE passthrough")
    seed = int(os.environ.get("KVFS_SOAK_SEED", "1"))
    full, drive = room == "full", source == "drive"
    # Half of them have the gate. What is in memory a clean stop takes, as a full pool may.
    has_gate = (path == "passthrough") ^ full ^ drive
    flags = () if not has_gate else in_memory(IN_MEMORY_BYTES) if full else GATE
    counts = soak_once(Soak(path, full, drive, seconds, seed, *serves_s, ends, flags=flags))
    print(json.dumps(counts))
    return counts


@pytest.mark.parametrize(
    ("path", "room", "source"),
    [("passthrough", "full", "drive"), ("daemon", "roomy", "directory")],
)
def test_a_few_seconds(path: str, room: str, source: str) -> None:
    """[killed-daemon] A kill, and a stop while the clients work."""
    counts = soak(path, room, source, 0, 2, serves_s=(0.8, 1.2))
    assert (counts["kill"], counts["stop"]) == (1, 1)
    assert min(counts["store"], counts["loads"], counts["kept"]) > 0, counts


@pytest.mark.proof
@pytest.mark.parametrize("source", ["directory", "drive"])
@pytest.mark.parametrize("room", ["roomy", "full"])
@pytest.mark.parametrize("path", ["daemon", "passthrough"])
def test_a_minute(path: str, room: str, source: str) -> None:
    """[killed-daemon] Every way in which a server ends, several times."""
    seconds = float(os.environ.get("KVFS_SOAK_S", PROOF_S))
    counts = soak(path, room, source, seconds, len(WAYS), serves_s=(0.5, 3.0))
    assert all(counts.get(way, 0) > 0 for way in (*WAYS, *CLIENTS_DO)), counts
    # What is in memory first, and not worth its write, fills no drive.
    if room == "full" and source == "directory" and not counts["flags"]:
        assert counts["most_share"] > 0.9
