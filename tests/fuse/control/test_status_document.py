"""docs/status.md and `kvfs status --json` hold each other: every key of a mount, with its unit."""

import contextlib
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from kvfs.core.lifecycle import TABLE, State, label
from kvfs.core.settings import Settings
from mount.control.status import describe_lost
from mount.fuse.channel import TIMED_OF
from tests.support.mounts.mounting import ROOT, Mounted

ROW: Final = re.compile(r"^\| `([\w.]+)` \| ([^|]+) \| ([^|]*) ?\|$", re.MULTILINE)
#: Objects whose keys are not ours to name.
ANY_KEY: Final = {
    "states": "STATE",
    "requests": "OPCODE",
    "requests_fast_path": "OPCODE",
    "request_times": "OPCODE",
    "errors": "ERRNO",
    "cache.evicted": "REASON",
    "cache.directories": "NAME",
    "cache.models": "MODEL",
    "cache.tier_behind.ages": "AGE",
    "held_by": "HOLDER",
    "tenants": "UID",
    "drives": "DRIVE",
}
OF_PASSTHROUGH: Final = {"backing_ids_open", "backing_ids_cached"}
OF_A_LOST_DEVICE: Final = {"device_lost"}
#: What a unit must be for the end of a key's name.
UNITS: Final = {"bytes": ("bytes", "counter of bytes"), "_s": ("seconds", "counter of seconds")}


def documented() -> dict[str, str]:
    """The unit of every key that the page has."""
    rows = ROW.findall((ROOT / "docs" / "status.md").read_text())
    assert len({key for key, _, _ in rows}) == len(rows)
    return {key: unit for key, unit, _ in rows}


def keys_of(status: Mapping[str, Any], above: str = "") -> set[str]:
    """The keys of *status*, those of objects in it behind a dot; *above* comes before all."""
    found: set[str] = set()
    for key, value in status.items():
        path = f"{above}{key}"
        if not isinstance(value, dict):
            found.add(path)
        elif path in ANY_KEY:
            for each in value.values():
                found |= keys_of({ANY_KEY[path]: each}, f"{path}.")
        else:
            found |= keys_of(value, f"{path}.")
    return found


def test_the_page_has_the_keys_of_a_mount(mount: Mounted, kv: Path, kvfs_only: None) -> None:
    """With a lease, so that somebody holds most of them, and an error that was returned."""
    (kv / "block").write_bytes(b"x" * 4096)
    (kv / "model@1@0@hash.data").write_bytes(b"of a model")
    for number in range(TIMED_OF):  # one of them is timed
        (kv / f"one of {TIMED_OF} {number}").write_bytes(b"x")
    with contextlib.suppress(PermissionError):
        os.mknod(kv / "device", stat.S_IFCHR | 0o600)
    status = mount.status()
    of_this_path = OF_PASSTHROUGH if status["data_path"] == "passthrough" else set()
    wanted = set(documented()) - OF_A_LOST_DEVICE - OF_PASSTHROUGH | of_this_path
    assert keys_of(status) == wanted


def test_the_page_has_the_keys_of_a_lost_mount() -> None:
    status = describe_lost(Settings(), "EIO")
    assert keys_of(status) < set(documented())
    assert set(status) >= OF_A_LOST_DEVICE


@pytest.mark.parametrize("key", documented())
def test_the_unit_is_the_one_that_the_name_ends_with(key: str) -> None:
    unit = documented()[key]
    for end, units in UNITS.items():
        assert (unit in units) == key.endswith(end), (key, unit)


def test_states_are_those_that_files_show() -> None:
    """All but that of an extent before its first file, which no file shows."""
    page = (ROOT / "docs" / "semantics.md").read_text()
    for state in set(TABLE) - {State.READY}:
        assert f"`{label(state)}`" in page
