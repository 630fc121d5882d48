"""Leases and what is kept leave some of the pool to others, whichever came first."""

import pytest

from kvfs.pool.space.space import DeviceRoom, Space, StayBounds

MIB = 1 << 20
TIB = 1 << 40


def test_each_has_its_share_and_both_together_leave_some() -> None:
    bounds = StayBounds(lambda: 1000, lease_max=0.9, pin_share=0.5)
    assert (bounds.leases_end_bytes(0), bounds.kept_end_bytes(0)) == (900, 500)
    assert bounds.leases_end_bytes(500) == 420
    assert bounds.kept_end_bytes(900) == 20
    assert bounds.kept_end_bytes(1000) == bounds.leases_end_bytes(1000) == 0
    assert bounds.kept_most_bytes == 500


def test_who_asks_for_more_gets_it() -> None:
    assert StayBounds(lambda: 1000, lease_max=1, pin_share=0.5).leases_end_bytes(0) == 1000
    assert StayBounds(lambda: 1000, lease_max=0.2, pin_share=1).kept_end_bytes(200) == 800


def test_they_follow_what_the_pool_can_hold() -> None:
    usable = [1000]
    bounds = StayBounds(lambda: usable[0], lease_max=0.9, pin_share=0.5)
    usable[0] = 100
    assert (bounds.leases_end_bytes(0), bounds.kept_end_bytes(0)) == (90, 50)
    assert bounds.kept_most_bytes == 50
    assert bounds.leases_end_bytes(100) == 0


@pytest.mark.parametrize(("capacity_bytes", "kept_bytes"), [(TIB, 32 * MIB), (64 * MIB, MIB)])
def test_of_a_device_no_more_is_kept_free_than_writes_in_flight_take(
    capacity_bytes: int, kept_bytes: int
) -> None:
    space = Space(capacity_bytes, 0)
    DeviceRoom(space, lambda: capacity_bytes // 2).measure()
    assert space.bound_bytes == capacity_bytes // 2 - kept_bytes
