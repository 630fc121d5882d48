"""A class takes a whole pool only if it uses much of it; else its parts."""

from pathlib import Path
from typing import Final

from tests.support.rules.house_rules import of_each
from tests.support.rules.source_tree import SOURCES, shown
from tests.support.rules.whole_pools import may_take, takers, uses

#: Ways to use a pool: by another name, in a call, in a change.
POOLS: Final = """
class Few:
    def __init__(self, pool: Pool, other: Other) -> None:
        self._other, self._whole = other, pool
        self._index = pool.index

    def look(self) -> None:
        mine = self._whole
        mine.open.inodes.clear()
        self._other.kernel.clear()


class Hands:
    def __init__(self, pool: Pool | None) -> None:
        self._few = Few(pool, self)
        _four(*(1, pool))


class Changes:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def do(self) -> None:
        with self._pool.change(self._pool.counters):
            pass


def _four(number: int, pool: Pool) -> None:
    pool.space, pool.rules, pool.extents, pool.numbers


def _one(pool: Pool) -> None:
    pool.kernel
"""


@of_each(SOURCES)
def test_what_takes_a_whole_pool_uses_much_of_it(path: Path) -> None:
    few = {one.name: sorted(uses(one)) for one in takers(path) if not may_take(one, uses(one))}
    assert not few, f"{shown(path)}: take these parts, or groups of them, instead: {few}"


def test_who_uses_little_of_a_pool_is_found(tmp_path: Path) -> None:
    path = tmp_path / "pools.py"
    path.write_text(POOLS)
    found = {one.name: one for one in takers(path)}
    used = {name: uses(one, [path]) for name, one in found.items()}
    assert used["Few"] == {"index", "open"}
    assert used["Hands"] == {"index", "open", "space", "rules", "extents", "numbers"}
    assert used["Changes"] == {"change", "counters"}
    assert used["_one"] == {"kernel"}
    little = [name for name, one in found.items() if not may_take(one, used[name])]
    assert little == ["Few", "_one"]
