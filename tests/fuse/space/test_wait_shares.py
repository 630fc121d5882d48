"""Requests that wait for room: one user's flood leaves others, and root, what they need to wait."""

import pytest

from kvfs.core.account import ROOT, Taken, Tenants
from kvfs.core.errors import NoSpace, OverShare
from mount.files.held_shares import WaitShares
from tests.fuse.conftest import NOBODY, OTHER

#: What all may hold together.
BOUND = 64


@pytest.fixture
def shares() -> WaitShares:
    return WaitShares(Taken(Tenants()), lambda: BOUND)


def waits(shares: WaitShares, uid: int) -> int:
    """Let *uid* wait with as many requests as it may, each of size 1; return how many."""
    for number in range(2 * BOUND):
        try:
            shares.begin(uid, 1)
        except (NoSpace, OverShare):
            return number
    return 2 * BOUND


def test_one_user_alone_has_three_quarters_and_root_the_rest(shares: WaitShares) -> None:
    assert waits(shares, NOBODY) == BOUND * 3 // 4
    with pytest.raises(OverShare):
        shares.begin(NOBODY, 1)
    assert waits(shares, ROOT) == BOUND // 4
    with pytest.raises(NoSpace):
        shares.begin(ROOT, 1)
    assert shares.turned_away == 4


def test_another_user_waits_beside_a_flood_and_both_have_an_equal_part_then(
    shares: WaitShares,
) -> None:
    waits(shares, NOBODY)
    assert waits(shares, OTHER) == BOUND // 8
    with pytest.raises(NoSpace):
        shares.begin(OTHER, 1)
    assert waits(shares, ROOT) == BOUND // 8
    for _ in range(BOUND // 2):
        shares.end(NOBODY, 1)
    assert waits(shares, OTHER) == BOUND * 3 // 8 - BOUND // 8
    with pytest.raises(OverShare):
        shares.begin(OTHER, 1)


def test_the_first_request_of_a_user_counts_it_too(shares: WaitShares) -> None:
    """One that is larger than an equal part is refused, although it has nothing waiting yet."""
    shares.begin(NOBODY, BOUND * 4 // 10)
    with pytest.raises(OverShare):
        shares.begin(OTHER, BOUND * 45 // 100)
    shares.begin(OTHER, BOUND * 3 // 10)
