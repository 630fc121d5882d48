"""Which blocks are read ahead of their use, for whom, and when none are."""

import dataclasses
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import pytest

from kvfs.storage.syscalls import Syscalls
from tests.support.store.driven import Driven
from tests.support.store.stores import Host, host, make_directory, put, settle

BLOCK_BYTES: Final = 300_000
COUNT: Final = 6
USER: Final = 1000
#: Opens between two idle moments that are followed, and blocks that a client is read ahead of.
WAITING: Final = 256
DEPTH: Final = 16


class Recorded(Syscalls):
    """Records which extents the kernel is asked to read, by their inodes on the device."""

    def __init__(self) -> None:
        self.asked: dict[int, int] = {}
        #: Those of which each page is in memory.
        self.cached: set[int] = set()
        self.fails = False

    def preadv(self, fd: int, buffers: Sequence[bytearray], at_bytes: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT and os.fstat(fd).st_ino not in self.cached:
            raise BlockingIOError(errno.EAGAIN, "not in memory")
        return os.preadv(fd, buffers, at_bytes)

    def posix_fadvise(self, fd: int, at_bytes: int, size_bytes: int, advice: int) -> None:
        if advice == os.POSIX_FADV_WILLNEED:
            if self.fails:
                raise OSError(errno.EIO, "the device says no")
            number = os.fstat(fd).st_ino
            assert self.asked.get(number, 0) == at_bytes
            self.asked[number] = at_bytes + size_bytes


class Chain:
    """A store with the blocks of one chain."""

    def __init__(self, made: Host, calls: Recorded, block_bytes: int = BLOCK_BYTES) -> None:
        self.made, self.calls = made, calls
        self.above = make_directory(made, b"kv")
        self.blocks = [
            put(made.store, self.above, b"%d" % number, bytes(block_bytes))
            for number in range(COUNT)
        ]
        settle(made.store)

    @property
    def store(self) -> Driven:
        return self.made.store

    def learn(self, uid: int = 0) -> None:
        """Load the chain twice, by another process than the one of ``load``."""
        for _ in range(2):
            for ino in self.blocks:
                self.store.load(ino, uid=uid, thread=9)
        assert not self.calls.asked

    def asked(self) -> list[int]:
        """Return which of the blocks were asked for: each was whole."""
        numbers = {self.made.extent(ino).stat().st_ino: at for at, ino in enumerate(self.blocks)}
        assert all(size_bytes >= BLOCK_BYTES for size_bytes in self.calls.asked.values())
        return sorted(numbers[number] for number in self.calls.asked)

    def figures(self) -> dict[str, int]:
        """Return what `kvfs status` says, but for zeros and bytes."""
        shown = self.store.describe()["prefetch"]
        return {key: count for key, count in shown.items() if count and "bytes" not in key}


@pytest.fixture
def calls() -> Recorded:
    return Recorded()


@pytest.fixture
def chain(calls: Recorded) -> Iterator[Chain]:
    with host() as made:
        made.start(calls, dataclasses.replace(made.settings, prefetch="learned"))
        yield Chain(made, calls)


def test_what_follows_is_read_while_the_first_is_loaded(chain: Chain) -> None:
    chain.learn()
    chain.store.load(chain.blocks[0])
    assert chain.asked() == [1, 2, 3, 4, 5]
    for ino in chain.blocks[1:4]:
        chain.store.load(ino)
    assert chain.figures() == {"links": COUNT, "read": 3, "used": 3}
    chain.store.let_unused_expire()
    assert chain.figures() == {"links": COUNT, "read": 5, "used": 3, "wasted": 2}
    assert chain.store.describe()["prefetch"]["read_bytes"] == 5 * BLOCK_BYTES


def test_what_is_in_memory_by_probation_is_not_read(calls: Recorded) -> None:
    """It is on no drive: to read it ahead would only take room from what is."""
    with host() as made:
        made.give_memory(COUNT * 2 * BLOCK_BYTES)
        made.start(calls, dataclasses.replace(made.settings, prefetch="learned"))
        chain = Chain(made, calls)
        assert set(chain.blocks[1:]) <= made.store.in_memory
        chain.learn()
        chain.store.load(chain.blocks[0])
        assert not calls.asked
        assert chain.figures() == {"links": COUNT}


def test_by_default_nothing_is_learned_or_read(calls: Recorded) -> None:
    with host() as made:
        made.start(calls)
        chain = Chain(made, calls)
        chain.learn()
        chain.store.load(chain.blocks[0])
        assert (chain.asked(), chain.figures()) == ([], {})


def test_who_reads_past_the_cache_is_not_read_ahead_of(chain: Chain) -> None:
    chain.learn()
    chain.store.load(chain.blocks[0], flags=os.O_DIRECT)
    assert chain.asked() == []


def narrow_block(chain: Chain) -> None:
    chain.store.change(chain.blocks[2], mode=0o600)


def narrow_directory(chain: Chain) -> None:
    """Two blocks lie elsewhere, where the user may not search."""
    private = make_directory(chain.made, b"private")
    for number in (2, 4):
        chain.store.rename(chain.above, b"%d" % number, private, b"%d" % number)
    chain.store.change(private, mode=0o700)


def give_away(chain: Chain) -> None:
    """Of a block's group the user may be: then the right that all others have does not count."""
    chain.store.change(chain.blocks[2], gid=77, mode=0o604)


@pytest.mark.parametrize(
    ("change", "read"),
    [
        (narrow_block, [1, 3, 4, 5]),
        (narrow_directory, [1, 3, 5]),
        (give_away, [1, 3, 4, 5]),
    ],
)
def test_what_the_client_may_not_read_is_not_read_for_it(
    chain: Chain, change: Callable[[Chain], None], read: list[int]
) -> None:
    chain.learn(uid=USER)
    change(chain)
    chain.store.load(chain.blocks[0], uid=USER)
    assert chain.asked() == read
    chain.store.load(chain.blocks[0], uid=0, thread=2)  # root may
    assert chain.asked() == [1, 2, 3, 4, 5]


def test_nothing_is_read_ahead_while_memory_is_short(chain: Chain) -> None:
    chain.learn()
    chain.store.lack_memory(0.5)
    chain.store.load(chain.blocks[0])
    assert chain.asked() == []
    chain.store.lack_memory(0.0)
    chain.store.load(chain.blocks[0], thread=2)
    assert chain.asked() == [1, 2, 3, 4, 5]


def test_nothing_is_read_ahead_on_a_drive_that_is_slow(chain: Chain) -> None:
    chain.learn()
    chain.store.slow_down(1000.0)
    chain.store.load(chain.blocks[0])
    assert chain.asked() == []


def test_what_is_in_memory_is_not_read_and_counted_apart(chain: Chain) -> None:
    chain.learn()
    chain.calls.cached = {chain.made.extent(ino).stat().st_ino for ino in chain.blocks[:3]}
    for ino in chain.blocks:
        chain.store.load(ino)
    assert chain.asked() == [3, 4, 5]
    assert chain.figures() == {"links": COUNT, "read": 3, "used": 3, "cached": 2}


def test_a_block_that_goes_ends_the_chain(chain: Chain) -> None:
    chain.learn()
    chain.store.unlink(chain.above, b"3")
    chain.store.erase_removed()
    assert chain.figures() == {"links": COUNT - 1}
    chain.store.load(chain.blocks[0])
    assert len(chain.calls.asked) == 2
    chain.store.unlink(chain.above, b"2")
    assert chain.figures() == {"links": COUNT - 2, "read": 1, "wasted": 1}


@pytest.mark.parametrize(("number", "read"), [(1, []), (2, [1]), (5, [1, 2, 3, 4])])
def test_a_block_that_is_being_rewritten_ends_the_chain(
    chain: Chain, number: int, read: list[int]
) -> None:
    """Its bytes are its writer's, and those behind it are loaded after it, if at all."""
    chain.learn()
    chain.store.open(chain.blocks[number], writer=True, truncate=False)
    chain.store.load(chain.blocks[0])
    assert chain.asked() == read


def test_a_drive_that_refuses_harms_nobody(chain: Chain) -> None:
    chain.learn()
    chain.calls.fails = True
    for ino in chain.blocks:
        chain.store.load(ino)
    assert chain.figures() == {"links": COUNT}
    assert chain.store.describe()["background_failures"] == 0


def test_a_restart_learns_anew(chain: Chain) -> None:
    chain.learn()
    chain.made.stop()
    chain.made.start(chain.calls, dataclasses.replace(chain.made.settings, prefetch="learned"))
    chain.store.load(chain.blocks[0])
    assert (chain.asked(), chain.figures()) == ([], {})


def test_of_many_opens_between_two_idle_moments_the_last_count(calls: Recorded) -> None:
    with host() as made:
        made.start(calls, dataclasses.replace(made.settings, prefetch="learned"))
        store, above = made.store, make_directory(made, b"kv")
        pairs = [
            [put(store, above, b"%d-%d" % (number, at), b"x") for at in range(2)]
            for number in range(WAITING + 6)
        ]
        settle(store)
        for _ in range(2):
            for thread, pair in enumerate(pairs, 10):
                for ino in pair:
                    store.load(ino, thread=thread)
        for thread, (ino, _) in enumerate(pairs, 10):
            store.open_to_load(ino, uid=0, thread=thread)
        store.run_all()
        read = [made.extent(ino).stat().st_ino in calls.asked for _, ino in pairs]
        assert read == [False] * 6 + [True] * WAITING


def test_of_small_blocks_so_many_are_read_ahead(calls: Recorded) -> None:
    with host() as made:
        made.start(calls, dataclasses.replace(made.settings, prefetch="learned"))
        above = make_directory(made, b"kv")
        blocks = [put(made.store, above, b"%d" % number, b"x") for number in range(2 * DEPTH)]
        settle(made.store)
        for ino in 2 * blocks:
            made.store.load(ino, thread=9)
        made.store.load(blocks[0])
        read = [made.extent(ino).stat().st_ino in calls.asked for ino in blocks]
        assert read == [False] + [True] * DEPTH + [False] * (DEPTH - 1)
