"""What the gate of a real mount learned outlives a stop, a kill and another version."""

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.support.clients.stepping import until
from tests.support.mounts.mounting import run_kvfs, skip_without_mounts, workplace
from tests.support.mounts.supervised import Supervised, skip_without_takeover

MIB: Final = 1 << 20
#: How long a burst may take to be judged on a busy machine: it ends within a second or so.
JUDGED_WAIT_S: Final = 60.0
BLOCKS: Final = 40
#: The status shows so many digits of a rate.
NEAR: Final = 0.001


@contextlib.contextmanager
def gate_mount(*sets: str) -> Iterator[Supervised]:
    """Yield a mount with a gate that has judged blocks."""
    skip_without_mounts()
    flags = ("--capacity=64M",)
    for each in ("eviction=gate", *sets):
        flags += ("--set", each)
    with (
        workplace("disk") as place,
        workplace() as pool,
        Supervised(pool, place / "kv", *flags) as mounted,
    ):
        for number in range(BLOCKS):
            draft = mounted.path / "draft.tmp"
            draft.write_bytes(bytes([number]) * 100_000)
            draft.rename(mounted.path / str(number))
        # Not all: one whose store went on in the next burst counts as used again.
        until(lambda: judged(mounted) >= BLOCKS // 2, "blocks are judged", JUDGED_WAIT_S)
        yield mounted
        mounted.stop()
        assert mounted.errors() == [], "\n".join(mounted.errors())


def told(mounted: Supervised) -> dict[str, Any]:
    """Return what the status says of the gate."""
    shown: dict[str, Any] = mounted.status()["gate"]
    return shown


def judged(mounted: Supervised) -> int:
    shown = told(mounted)
    return int(shown["admitted"] + shown["turned_away"])


def assert_goes_on(mounted: Supervised, before: dict[str, Any]) -> None:
    shown = told(mounted)
    for known in ("threshold", "classes", "hits_a_block"):
        assert shown[known] == pytest.approx(before[known], abs=NEAR), known


def told_when_all_is_judged(mounted: Supervised) -> dict[str, Any]:
    """Return the same after a stop and a start: no burst waits for its verdicts then."""
    mounted.stop()
    mounted.start()
    shown = told(mounted)
    assert shown["classes"] > 0
    return shown


def test_a_stop_keeps_what_was_learned() -> None:
    with gate_mount() as mounted:
        before = told_when_all_is_judged(mounted)
        mounted.stop()
        mounted.start()
        assert judged(mounted) == 0
        assert_goes_on(mounted, before)


def test_a_server_that_follows_goes_on_from_the_last_save() -> None:
    """After a stop nothing new is touched, so the last save has all."""
    with gate_mount() as mounted:
        before = told_when_all_is_judged(mounted)
        skip_without_takeover(mounted)
        mounted.kill_server()
        mounted.follow()
        assert_goes_on(mounted, before)
        run_kvfs("upgrade", str(mounted.path))
        mounted.adopt()
        assert_goes_on(mounted, before)


def test_a_budget_is_shown_and_its_price_outlives_a_stop() -> None:
    """So small a budget that what is not judged yet uses it up."""
    sets = ("probation_bytes=8M", "index_preallocate_bytes=1M", "write_budget_bytes=1M")
    with gate_mount(*sets) as mounted:
        until(lambda: told(mounted)["price"] > 0, "more is written than may be", JUDGED_WAIT_S)
        before = told(mounted)
        assert before["budget_bytes"] == MIB
        assert before["used_hour"] > 1
        assert before["used_day"] > 1
        assert before["lasts_days"] is None
        assert "budget" in run_kvfs("status", str(mounted.path)).stdout
        mounted.stop()
        mounted.start()
        assert told(mounted)["price"] > 0
