"""The power is cut at any point of a load: what comes back is whole, whatever the drive kept.

The drive's writes and flushes are recorded below a real mount (tests/support/recording.py), and
each image is what a drive may hold after a cut (cut_images.py). The same load on plain XFS stands
beside it, and shows that the tool finds what is wrong. A fault tells the seed: KVFS_CUTS_SEED.
"""

from collections import Counter

import pytest

from tests.support.cut_images import Mode
from tests.support.cut_proof import SEED, Kind, Plan, Proof, prove, prove_all
from tests.support.cut_writer import RENAMED

pytestmark = [pytest.mark.needs_fuse, pytest.mark.needs_loop, pytest.mark.usefixtures("caplog")]

RECORDED_S = 6.0
#: A drive that lies takes away what was durable: nothing on it proves that it was there.
TRUTHFUL = tuple(mode for mode in Mode if mode is not Mode.LYING)


def hold(done: Proof) -> None:
    """Assert that what a truthful drive kept is right, and that there was something."""
    print(f"\n{done}")
    assert all(done.tallies[mode].is_good for mode in TRUTHFUL), "\n".join(done.lines)
    assert sum(tally.read for tally in done.tallies.values()) > 0
    assert (done.evicted_blocks > 0) == (done.plan.kind is Kind.FULL)


@pytest.mark.parametrize("kind", [Kind.ROOMY, Kind.FULL])
def test_fifty_images_hold_nothing_wrong(kind: Kind) -> None:
    """[power-cut] Stored by a rename, evicted, in directories that are renamed."""
    hold(prove(Plan(kind, SEED, RENAMED, RECORDED_S, 50)))


def test_the_tool_finds_what_plain_xfs_leaves() -> None:
    """Without an fsync a name may be durable before its bytes."""
    done = prove(Plan(Kind.PLAIN, SEED, RENAMED, RECORDED_S, 12))
    print(f"\n{done}")
    faults = sum((tally.faults for tally in done.tallies.values()), start=Counter[str]())
    assert faults["empty"] > 0
    assert faults["short"] > 0


@pytest.mark.proof
def test_two_thousand_images() -> None:
    """[power-cut] Every mode, on several recordings, and plain XFS beside them."""
    plans = [
        Plan(kind, SEED + number, RENAMED, 40.0, 250)
        for number in range(4)
        for kind in (Kind.ROOMY, Kind.FULL)
    ]
    for done in prove_all([*plans, Plan(Kind.PLAIN, SEED, RENAMED, 40.0, 100)]):
        if done.plan.kind is Kind.PLAIN:
            print(f"\n{done}")
        else:
            hold(done)
