"""One thing of a pool is corrupted: right bytes, a miss, or a refusal in one line.

A bit, a zeroed page, a file cut short, two of a kind swapped, or an older copy; of the index, the
identities, the extents and every other file; after a clean stop, a kill and a power cut. Never a
dead server. ``KVFS_CORRUPTIONS_SEED`` gives the seed of the drawing.
"""

import os
from typing import Final

import pytest

from tests.support.devices.corruption_runs import BAD, GOOD, Case, run_cases, table
from tests.support.devices.corruptions import ENDS, TARGETS, WAYS

pytestmark = pytest.mark.needs_fuse  # trusted.* attributes need root

SEED: Final = int(os.environ.get("KVFS_CORRUPTIONS_SEED", "1"))


def hold(cases: list[Case]) -> None:
    print(f"\n{table(cases)}")
    wrong = [f"{case.what}: {case.came}" for case in cases if case.end not in GOOD]
    assert not wrong, f"seed {SEED}, {len(wrong)} of {len(cases)}:\n" + "\n".join(wrong[:20])
    for key, values in (("target", TARGETS), ("way", WAYS), ("end", ENDS)):
        assert {case.what[key] for case in cases} == set(values)
    # It is a test of damage only if some was met.
    assert {case.end for case in cases} >= set(GOOD)


def test_three_hundred_corruptions() -> None:
    """What CI tries."""
    hold(run_cases(SEED, 300, processes=2))


@pytest.mark.proof
def test_ten_thousand_corruptions() -> None:
    """The same, and more of them."""
    hold(run_cases(SEED, 10_000, processes=2))


def test_how_a_corruption_ended_is_told() -> None:
    def ended(**came: object) -> str:
        return Case({"target": "index"}, came).end

    assert ended(came="refused", said="a line") == "refused"
    assert ended(came="refused", repair="wrong") == "unexpected error"
    assert ended(came="right", unexpected=["put: OSError"]) == "unexpected error"
    assert ended(came="dead") in BAD
