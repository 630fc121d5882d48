"""Which lookups that found nothing count as misses, by what follows them and when."""

from collections.abc import Iterator

import pytest

from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.pool.figures import looks
from kvfs.pool.figures.looks import CREATE_LOOK_S, RENAME_LOOK_S, Looks

NAME = b"block"


class Watched(Looks):
    """Looks with a clock that the test sets, and the misses that came of them."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.misses: list[tuple[InodeNo, bytes]] = []
        self.evicted: set[tuple[InodeNo, bytes]] = set()
        super().__init__(
            lambda: self.now_s,
            lambda parent, name: self.misses.append((parent, name)),
            lambda parent, name: (parent, name) in self.evicted,
        )


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.now_s += RENAME_LOOK_S
    made.settle()
    before = len(made.misses)
    made.settle()
    assert len(made.misses) == before, "a look counted twice"


def test_a_look_counts_once_it_is_old(watched: Watched) -> None:
    watched.add(ROOT_INODE, NAME)
    watched.now_s += RENAME_LOOK_S / 2
    watched.add(ROOT_INODE, b"younger")
    watched.settle()
    assert watched.misses == []
    watched.now_s += RENAME_LOOK_S / 2
    watched.settle()
    assert watched.misses == [(ROOT_INODE, NAME)]


@pytest.mark.parametrize("within_s", [CREATE_LOOK_S, RENAME_LOOK_S])
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("earlier", [0, 1, 3])
def test_only_the_last_look_may_be_the_stores_own(
    watched: Watched, earlier: int, keeps: bool, within_s: float
) -> None:
    """If the kernel keeps that a name is missing, it repeats a look for reasons of its own."""
    watched.apply(kernel_keeps=keeps)
    for _ in range(earlier + 1):
        watched.add(ROOT_INODE, NAME)
    watched.now_s += within_s
    watched.stored(ROOT_INODE, NAME, within_s)
    assert len(watched.misses) == (min(1, earlier) if keeps else earlier)


@pytest.mark.parametrize("keeps", [True, False])
def test_the_two_looks_for_an_evicted_name_are_one_miss(watched: Watched, keeps: bool) -> None:
    watched.apply(kernel_keeps=keeps)
    watched.evicted.add((ROOT_INODE, NAME))
    watched.add(ROOT_INODE, NAME)
    watched.add(ROOT_INODE, NAME)
    watched.now_s += RENAME_LOOK_S
    watched.settle()
    assert watched.misses == [(ROOT_INODE, NAME)]


def test_a_look_long_before_the_store_is_the_clients(watched: Watched) -> None:
    watched.add(ROOT_INODE, NAME)
    watched.now_s += CREATE_LOOK_S * 1.01
    watched.stored(ROOT_INODE, NAME, CREATE_LOOK_S)
    assert watched.misses == [(ROOT_INODE, NAME)]


def test_nobody_looked_for_the_block_where_a_directory_is_made(watched: Watched) -> None:
    watched.add(ROOT_INODE, NAME)
    watched.add(ROOT_INODE, NAME)
    watched.made(ROOT_INODE, NAME)
    watched.stored(ROOT_INODE, NAME, RENAME_LOOK_S)
    assert watched.misses == []


def test_many_looks_do_not_pile_up(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "_WAITING_MAX", 4)
    for number in range(10):
        watched.add(ROOT_INODE, b"%d" % number)
    assert [name for _, name in watched.misses] == [b"%d" % number for number in range(6)]
