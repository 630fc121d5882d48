"""The two miniature caches by which the adaptive policy learns."""

import random

from kvfs.core.ghosts import NO_SAMPLE, ShadowCaches


def flooded(shadows: ShadowCaches, rounds: int) -> None:
    """Use 50 names again and again, with 400 new ones after each round."""
    for number in range(rounds):
        for name in [*range(50), *range(1000 + 400 * number, 1400 + 400 * number)]:
            shadows.use(name)


def test_before_the_pool_is_full_nothing_is_learned() -> None:
    shadows = ShadowCaches()
    assert shadows.sample_bits == NO_SAMPLE
    flooded(shadows, 10)
    assert not shadows.once_first


def test_a_small_pool_is_tried_whole_and_a_large_one_in_part() -> None:
    shadows = ShadowCaches()
    for blocks, bits in {1: 0, 511: 0, 512: 1, 1023: 1, 1024: 3, 1 << 20: (1 << 12) - 1}.items():
        shadows.resize(blocks)
        assert shadows.sample_bits == bits


def test_a_flood_favours_what_was_used_again() -> None:
    shadows = ShadowCaches()
    shadows.resize(100)
    flooded(shadows, 20)  # by age nothing is ever found
    assert shadows.once_first


def test_blocks_used_twice_soon_and_never_again_favour_age() -> None:
    """Whatever came back once would stay and fill the pool."""
    shadows = ShadowCaches()
    shadows.resize(100)
    flooded(shadows, 20)
    draw = random.Random(1)
    for first in range(1000, 41_000, 4):
        shadows.use(first)
        shadows.use(first - 4 * draw.randrange(20, 80))
    assert not shadows.once_first


def test_another_size_keeps_what_is_known() -> None:
    shadows = ShadowCaches()
    shadows.resize(100)
    flooded(shadows, 20)
    for blocks in (120, 90, 2000):
        shadows.resize(blocks)
        assert shadows.once_first


def test_where_both_find_all_nothing_changes() -> None:
    shadows = ShadowCaches()
    shadows.resize(100)
    for once_first in (False, True):
        for _ in range(50):
            for name in range(80):
                shadows.use(name)
        assert shadows.once_first is once_first
        flooded(shadows, 20)
