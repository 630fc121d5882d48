"""Who is refused when leases reach their bound, and who still gets one: told from numbers."""

from collections.abc import Callable

from kvfs.core.account import Accounts
from kvfs.machine.processes import NOBODY, Maker
from kvfs.pool.rules.leases import LeaseShares, Lessee

ONE, OTHER, THIRD = (Maker(100 + number, number) for number in range(1, 4))
USER, NEIGHBOUR = 1000, 1001
CAPACITY, BOUND = 1000, 800


def shares(*held: tuple[int, Maker, int], bound: Callable[[], int] = lambda: BOUND) -> LeaseShares:
    made = LeaseShares(Accounts(), bound, lambda: CAPACITY)
    for uid, maker, size_bytes in held:
        made.count(uid, maker, size_bytes)
    return made


def test_up_to_the_bound_nobody_is_refused() -> None:
    leases = shares((USER, ONE, BOUND))
    assert not leases.refuses(USER, ONE)
    assert leases.gives(USER, 0)


def test_beyond_it_who_holds_more_than_its_share_is_refused() -> None:
    leases = shares((USER, ONE, BOUND), (USER, OTHER, 50))
    assert leases.refuses(USER, ONE)
    assert not leases.refuses(USER, OTHER)
    assert not leases.refuses(USER, THIRD)
    assert not leases.refuses(NEIGHBOUR, THIRD)


def test_a_user_below_its_share_is_not_refused_however_many_processes_another_has() -> None:
    forked = [(USER, Maker(number, number), 7) for number in range(200, 320)]
    leases = shares((NEIGHBOUR, ONE, 300), *forked)
    assert leases.held_bytes > BOUND
    assert not leases.refuses(NEIGHBOUR, ONE)
    assert all(leases.refuses(uid, maker) for uid, maker, _ in forked)


def test_what_the_bound_leaves_is_for_what_is_under_way_and_for_others() -> None:
    leases = shares((USER, ONE, BOUND))
    assert leases.gives(USER, 50)
    assert not leases.gives(USER, 51)
    assert leases.gives(NEIGHBOUR, 100)
    assert not leases.gives(NEIGHBOUR, 101)


def test_a_lease_that_ends_counts_no_more() -> None:
    leases = shares((USER, ONE, BOUND + 1), (USER, ONE, -2))
    assert not leases.refuses(USER, ONE)
    leases.count(USER, ONE, 1 - BOUND)
    assert leases.most() is None
    assert leases.held_bytes == 0


def test_no_room_for_leases_at_all_refuses_only_who_has_one() -> None:
    leases = shares(bound=lambda: 0)
    assert leases.bound_bytes == 0
    assert not leases.refuses(USER, ONE)
    leases.count(USER, ONE, 1)
    assert leases.refuses(USER, ONE)
    assert not leases.refuses(USER, OTHER)


def test_the_process_that_holds_most_is_named_with_all_its_users() -> None:
    leases = shares((USER, ONE, 30), (NEIGHBOUR, OTHER, 20), (USER, OTHER, 20), (0, NOBODY, 39))
    assert leases.most() == Lessee(OTHER, 40)
