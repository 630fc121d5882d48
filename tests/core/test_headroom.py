"""How much of a pool is kept free ahead of writers, at least and at most."""

from kvfs.core.headroom import Headroom

GIB = 1 << 30


def test_a_writer_of_any_speed_has_a_part_of_the_pool_kept_free() -> None:
    headroom = Headroom(GIB)
    assert headroom.target_bytes(0.0) == GIB // 128
    headroom.count(100 * GIB, 0.0)
    assert headroom.target_bytes(0.0) == headroom.most_bytes == GIB // 32
    assert headroom.target_bytes(60.0) == GIB // 128


def test_a_large_pool_keeps_no_more_free_than_a_writer_takes_between_two_looks() -> None:
    assert Headroom(1024 * GIB).target_bytes(0.0) == GIB // 4
