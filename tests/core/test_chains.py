"""Which block follows which, as a plain model has it; what is read ahead is bounded and counted."""

import random
from collections.abc import Sequence
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.core.blocks_ahead import TRIED, UNUSED_S, BlocksAhead, Got
from kvfs.core.chains import LINK_BYTES, SURE, Chains
from kvfs.core.types import NO_INODE, InodeNo

#: As the page says (docs/eviction.md).
LINKS: Final = 1_048_576
CLIENTS: Final = 1024
MIB: Final = 1 << 20
CHAIN: Final = [InodeNo(number) for number in range(100, 108)]


class PlainChains:
    """The same in a few lines, for so few blocks that none wants another one's place."""

    def __init__(self) -> None:
        self.links: dict[int, list[int]] = {}
        self.last: dict[int, int] = {}
        self.foretold: dict[int, list[int]] = {}

    def opened(self, client: int, ino: int, depth: int) -> list[int]:
        last = self.last.get(client)
        if last == ino:
            return []
        if last is not None:
            link = self.links.get(last)
            if link is not None and link[0] == ino:
                link[1] = min(3, link[1] + 1)
            elif link is not None and link[1] > 1:
                link[1] -= 1
            else:
                self.links[last] = [ino, 1]
        self.last[client] = ino
        foretold = self.foretold.get(client, [])
        foretold = foretold[foretold.index(ino) + 1 :] if ino in foretold else []
        before = len(foretold)
        for _ in range(depth - before):
            following, seen = self.links.get(foretold[-1] if foretold else ino, (0, 0))
            if seen < 2 or following == ino or following in foretold:
                break
            foretold.append(following)
        self.foretold[client] = foretold
        return foretold[before:]


opens = st.tuples(st.integers(1, 3), st.integers(1, 12), st.integers(1, 5))


@given(st.lists(st.one_of(opens, st.integers(1, 12)), max_size=150))
def test_it_is_what_a_plain_model_says(steps: Sequence[tuple[int, int, int] | int]) -> None:
    chains, plain = Chains(), PlainChains()
    for step in steps:
        if isinstance(step, int):  # the block is gone
            chains.drop(InodeNo(step))
            plain.links.pop(step, None)
        else:
            client, ino, depth = step
            assert chains.opened(client, InodeNo(ino), depth) == plain.opened(client, ino, depth)
        assert chains.links == len(plain.links)


def load(chains: Chains, blocks: Sequence[InodeNo], client: int = 1, depth: int = 3) -> list[int]:
    return [ino for block in blocks for ino in chains.opened(client, block, depth)]


def test_a_chain_is_foretold_once_it_was_seen_twice() -> None:
    chains = Chains()
    assert load(chains, CHAIN) == []
    assert load(chains, CHAIN) == []
    assert load(chains, CHAIN, client=2) == CHAIN[1:]  # each block once, for another client too
    assert chains.links == len(CHAIN)


def test_a_loop_that_the_open_is_not_in_is_foretold_once() -> None:
    chains, (first, one, other) = Chains(), CHAIN[:3]
    for _ in range(SURE):
        load(chains, [first, *[one, other] * (SURE + 2)])
    assert chains.opened(2, first, 8) == [one, other]


def test_one_open_in_another_order_does_not_end_a_link_that_is_sure() -> None:
    chains = Chains()
    first, one, other = CHAIN[:3]
    for _ in range(SURE):
        load(chains, [first, one])
    load(chains, [first, other])
    assert chains.next_of(first) == NO_INODE
    load(chains, [first, one])
    assert chains.next_of(first) == one


def test_no_more_than_the_depth_is_foretold_at_once() -> None:
    chains = Chains()
    for _ in range(SURE + 1):  # so that one open in another order changes nothing
        load(chains, CHAIN)
    assert chains.opened(2, CHAIN[0], 3) == CHAIN[1:4]
    assert chains.opened(2, CHAIN[2], 3) == CHAIN[4:6]  # it passed one over
    assert chains.opened(2, CHAIN[0], 1) == CHAIN[1:2]  # it began anew


def test_an_order_by_chance_foretells_nothing_to_speak_of() -> None:
    chains, chance = Chains(), random.Random(4)
    blocks = [InodeNo(number) for number in range(1, 257)]
    foretold = 0
    for _ in range(50):
        chance.shuffle(blocks)
        foretold += len(load(chains, blocks))
    assert foretold < 0.02 * 50 * len(blocks)


def test_the_table_is_bounded_and_what_is_not_seen_again_gives_way() -> None:
    assert Chains().places == LINKS
    assert LINKS * LINK_BYTES == 17 * MIB
    chains = Chains(links_max=16)
    for number in range(1, 1000):
        chains.opened(1, InodeNo(number), 1)
    assert chains.links <= 16
    for _ in range(20):
        load(chains, CHAIN[:4])
    assert [chains.next_of(ino) for ino in CHAIN[:3]] == CHAIN[1:4]


def test_clients_are_bounded_and_the_one_that_opened_last_is_known() -> None:
    chains = Chains()
    for _ in range(SURE):
        load(chains, CHAIN[:2])
        chains.opened(1, InodeNo(1), 1)
    for client in range(2, 2 + CLIENTS):
        chains.opened(client, InodeNo(2), 1)
    before = chains.links
    chains.opened(1, InodeNo(3), 1)  # what it opened before is forgotten
    assert chains.links == before
    chains.opened(1 + CLIENTS, InodeNo(3), 1)
    assert chains.links == before + 1


def test_a_block_that_is_gone_leads_nowhere() -> None:
    chains = Chains()
    for _ in range(SURE):
        load(chains, CHAIN)
    chains.drop(CHAIN[3])
    assert chains.next_of(CHAIN[3]) == NO_INODE
    assert load(chains, CHAIN[:3], client=2, depth=16) == CHAIN[1:4]


def test_what_is_opened_in_time_was_used_and_the_rest_was_wasted() -> None:
    ahead = BlocksAhead()
    for ino in CHAIN[:4]:
        block = ahead.ask(ino, 10, "tenant", now_s=0.0)
        assert block is not None
        block.got = Got.READ
    cached, late = ahead.ask(CHAIN[4], 10, "t", 0.0), ahead.ask(CHAIN[5], 10, "t", 0.0)
    assert cached is not None
    assert late is not None
    cached.got = Got.CACHED
    ahead.opened(CHAIN[0])
    ahead.opened(CHAIN[4])
    ahead.opened(CHAIN[5])  # before it was read, so nobody must read it any more
    assert late.got is Got.NOTHING
    ahead.drop(CHAIN[1])
    ahead.expire(UNUSED_S - 1)
    assert (ahead.used, ahead.wasted, ahead.cached, ahead.size_bytes) == (1, 1, 1, 20)
    ahead.expire(UNUSED_S)
    assert (ahead.read, ahead.read_bytes, ahead.used, ahead.wasted) == (4, 40, 1, 3)
    assert (len(ahead), ahead.size_bytes) == (0, 0)


def test_a_tenant_has_half_of_the_bound() -> None:
    ahead = BlocksAhead()
    assert ahead.ask(CHAIN[0], 64 * MIB, "one", 0.0) is not None
    assert ahead.ask(CHAIN[0], 1, "other", 0.0) is None  # it is read already
    assert ahead.ask(CHAIN[1], 1, "one", 0.0) is None
    assert ahead.ask(CHAIN[2], 40 * MIB, "other", 0.0) is not None
    assert ahead.ask(CHAIN[3], 40 * MIB, "third", 0.0) is None
    ahead.opened(CHAIN[0])
    assert ahead.ask(CHAIN[1], 64 * MIB, "one", 0.0) is not None


@pytest.mark.parametrize("got", [Got.READ, Got.CACHED])
def test_what_does_not_pay_is_tried_seldom_until_it_does(got: Got) -> None:
    ahead = BlocksAhead()
    tried = 0
    for number in range(1, 1601):
        if ahead.is_tried():
            tried += 1
            block = ahead.ask(InodeNo(number), 1, "t", float(number))
            assert block is not None
            block.got = got
        ahead.expire(number + UNUSED_S)
    assert tried <= 3 + 1600 // TRIED
    for number in range(2000, 2000 + 64 * TRIED):
        if ahead.is_tried():
            block = ahead.ask(InodeNo(number), 1, "t", float(number))
            assert block is not None
            block.got = Got.READ
            ahead.opened(block.ino)
    assert all(ahead.is_tried() for _ in range(10))
