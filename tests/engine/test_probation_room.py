"""How much memory blocks may take when it is scarce, and afterwards."""

from hypothesis import given
from hypothesis import strategies as st

from kvfs.pool.open.probation import MemoryRoom

_MOST_BYTES = 1 << 30


def test_it_is_all_there_is_while_nobody_waits() -> None:
    room = MemoryRoom(_MOST_BYTES)
    room.adapt(0.0, 0)
    assert room.size_bytes == _MOST_BYTES


def test_it_halves_what_is_held_while_memory_is_scarce() -> None:
    room = MemoryRoom(_MOST_BYTES)
    room.adapt(0.5, _MOST_BYTES // 2)
    assert room.size_bytes == _MOST_BYTES // 4
    for _ in range(40):
        room.adapt(0.5, room.size_bytes)
    assert room.size_bytes == 0


def test_it_stays_in_between_and_grows_back_in_a_minute() -> None:
    room = MemoryRoom(_MOST_BYTES)
    for _ in range(40):
        room.adapt(0.5, 0)
    room.adapt(0.05, 0)
    assert room.size_bytes == 0
    for _ in range(59):
        room.adapt(0.0, 0)
    assert room.size_bytes < _MOST_BYTES
    for _ in range(2):
        room.adapt(0.0, 0)
    assert room.size_bytes == _MOST_BYTES


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 2 * _MOST_BYTES))))
def test_it_is_never_below_nothing_or_above_all(seconds: list[tuple[float, int]]) -> None:
    room = MemoryRoom(_MOST_BYTES)
    for waited_share, held_bytes in seconds:
        room.adapt(waited_share, held_bytes)
        assert 0 <= room.size_bytes <= _MOST_BYTES
