"""The power is cut at any point of a load: what comes back is whole, whatever the drive kept.

The drive's writes and flushes are recorded below a real mount, and each image is what a drive
may hold after a cut (recording.py and images.py in tests/support/devices/power_cuts). The same load
on plain XFS stands beside it, and shows that the tool finds what is wrong. A fault tells the seed:
KVFS_CUTS_SEED.
"""

from collections import Counter
from itertools import product
from multiprocessing import resource_tracker
from typing import Final

import pytest

from tests.support.devices.power_cuts.images import Mode
from tests.support.devices.power_cuts.proof import SEED, Kind, Plan, Proof, prove, prove_all
from tests.support.devices.power_cuts.takeovers import During
from tests.support.devices.power_cuts.writer import IN_PLACE, RENAMED
from tests.support.mounts.modes import GATE, in_memory
from tests.support.mounts.mounting import kernel_has_passthrough

pytestmark = [pytest.mark.needs_fuse, pytest.mark.needs_loop, pytest.mark.usefixtures("caplog")]

RECORDED_S = 8.0
#: Several servers end in it, and the window passes if blocks age.
TAKEN_OVER_S = {During.AGEING: 24.0, During.HONOURED: 12.0, During.HANGING: 24.0}
ALL_WAYS = (*RENAMED, *IN_PLACE)
#: In a pool that is full of blocks written in place nothing can be evicted while the writer lives.
WAYS = {Kind.ROOMY: ALL_WAYS, Kind.FULL: RENAMED, Kind.PLAIN: RENAMED}
#: A fault of a mapping waits for a drive that hangs with all threads of this process.
MAPPED: Final = ("store_by_mapping", "rewrite_by_mapping")
#: A window that passes several times in a short recording, and a log of the index that lags behind:
#: what is durable and came later must come from the files.
SHORT = ("--set", "durable_within_s=1", "--set", "index_log_s=5")
#: All blocks have a checksum, which alone tells what a lying drive has made of them. The default
#: leaves out what never was in the page cache, and some on a busy machine, and counts them.
CHECKED = ("--set", "checksum_share=1", "--set", "verify=open")
#: Blocks of all sizes that are stored fit into memory first; a sync alone makes these durable.
IN_MEMORY: Final = in_memory(2 << 20)
#: A machine that does ten other things may be late with a window of a second.
LATE_S = 2.0
PROOF_S = 40.0
#: A server lives for some 3 s: with a window that began anew at each take-over no block would ever
#: become durable. What is not served for seconds is late by as much.
TAKEN_OVER = {
    During.AGEING: ("--set", "durable_within_s=8", "--set", "index_log_s=5"),
    During.HONOURED: ("--set", "durable_within_s=0", "--set", "index_log_s=5", "--fsync=honour"),
    During.HANGING: (
        *("--set", "durable_within_s=8", "--set", "index_log_s=2", "--fsync=honour"),
        *("--set", "device_silent_s=1"),
    ),
}
TAKEN_OVER_LATE_S = 4.0
#: How a verdict says that a block, or an attribute, is missing or old, and not wrong.
LOST: Final = (": lost at an age of", "which is older than what is durable")
#: A drive that lies takes away what was durable, whole file systems too: it is not there then.
TRUTHFUL = tuple(mode for mode in Mode if mode is not Mode.LYING)


def hold(done: Proof) -> None:
    """Assert that what a truthful drive kept is right, and that nothing durable is lost."""
    print(f"\n{done}")
    assert all(done.tallies[mode].is_good for mode in TRUTHFUL), "\n".join(done.lines)
    lied = [line for line in done.lines if Mode.LYING in line]
    wrong = [line for line in lied if not any(words in line for words in LOST)]
    assert not wrong, "\n".join(wrong)
    assert sum(tally.due for tally in done.tallies.values()) > 0
    assert (done.evicted_blocks > 0) == (done.plan.kind is Kind.FULL)
    if done.plan.during is During.HANGING:
        assert done.takeovers["hangs"] > 0
        assert done.takeovers["copies"] > 0
        assert done.refused_calls > 0


@pytest.mark.parametrize(
    ("kind", "mode"), [(Kind.ROOMY, GATE), (Kind.FULL, ()), (Kind.FULL, IN_MEMORY)]
)
def test_twenty_images_hold_nothing_wrong_and_lack_nothing_durable(
    kind: Kind, mode: tuple[str, ...]
) -> None:
    """Blocks stored in all ways, evicted, in directories that are renamed."""
    flags = (*SHORT, *CHECKED, *mode)
    hold(prove(Plan(kind, SEED, WAYS[kind], RECORDED_S, 20, flags, LATE_S)))


@pytest.mark.parametrize(
    ("path", "during"),
    [
        ("daemon", During.HONOURED),
        ("passthrough", During.AGEING),
        ("daemon", During.HANGING),
        ("passthrough", During.HANGING),
    ],
)
def test_images_of_a_load_whose_servers_end_lack_nothing_acknowledged(
    path: str, during: During
) -> None:
    """[durable-taken-over] SIGKILL and upgrades, fsyncs that are honoured, a drive that hangs."""
    if not kernel_has_passthrough():
        pytest.skip("the kernel sends nothing again")
    hold(prove(taken_over(Kind.ROOMY, SEED, TAKEN_OVER_S[during], 16, path, during)))


def taken_over(
    kind: Kind, seed: int, seconds: float, images: int, path: str, during: During
) -> Plan:
    """Return a plan whose servers end."""
    flags = (*TAKEN_OVER[during], *CHECKED, f"--data-path={path}")
    if during is During.HONOURED:  # which says when a block that was in memory is durable
        flags += IN_MEMORY if kind is Kind.FULL else GATE
    ways = WAYS[kind]
    if during is During.HANGING:
        ways = tuple(way for way in ways if way not in MAPPED)
    return Plan(kind, seed, ways, seconds, images, flags, TAKEN_OVER_LATE_S, during)


def test_the_tool_finds_what_plain_xfs_leaves() -> None:
    """Without an fsync a name may be durable before its bytes."""
    done = prove(Plan(Kind.PLAIN, SEED, RENAMED, RECORDED_S, 12))
    print(f"\n{done}")
    faults = sum((tally.faults for tally in done.tallies.values()), start=Counter[str]())
    assert faults["empty"] > 0
    assert faults["short"] > 0


@pytest.fixture(scope="module")
def tracker() -> None:
    """Start multiprocessing's resource tracker, which lives on with a pipe of ours."""
    resource_tracker.ensure_running()


@pytest.mark.proof
@pytest.mark.usefixtures("tracker")
def test_seven_hundred_images_of_servers_that_end() -> None:
    """Kills, upgrades, honoured fsyncs and drives that hang, on both data paths."""
    plans = [
        taken_over(kind, SEED + number, PROOF_S, 64, path, during)
        for number, (path, during) in enumerate(product(("daemon", "passthrough"), During))
        for kind in (Kind.ROOMY, Kind.FULL)
    ]
    for done in prove_all(plans):
        hold(done)
        assert done.takeovers["kills"] > 0
        assert (done.fsyncs > 0) == (done.plan.during is not During.AGEING)


@pytest.mark.proof
@pytest.mark.usefixtures("tracker")
def test_two_thousand_images() -> None:
    """Every mode, with the default window and a short one, beside plain XFS; half by the gate."""
    plans = [
        Plan(
            *(kind, SEED + number, WAYS[kind], PROOF_S, 250),
            (*flags, *((), GATE if kind is Kind.ROOMY else IN_MEMORY)[number // 2]),
            late_s,
        )
        for number, flags in enumerate((CHECKED, (*SHORT, *CHECKED)) * 2)
        for kind, late_s in ((Kind.ROOMY, LATE_S * (number % 2)), (Kind.FULL, LATE_S))
    ]
    for done in prove_all([*plans, Plan(Kind.PLAIN, SEED, RENAMED, PROOF_S, 100)]):
        if done.plan.kind is Kind.PLAIN:
            print(f"\n{done}")
        else:
            hold(done)
