"""A store of three drives, one of which was removed: also if that ended after the first header."""

import json
from collections.abc import Iterator
from typing import Final

import pytest

from kvfs.core.drives import Numbering
from kvfs.core.errors import NotFound, UsageError
from kvfs.core.types import ROOT_INODE
from kvfs.devices import destroy_source, open_drives
from kvfs.devices.pool_drives import note_removed
from tests.engine.test_missing_drive import drives_of, drops_all, without
from tests.support.store.loop_guard import LoopGuard
from tests.support.store.stores import MIB, Host, host, put, tree
from tests.support.store.three_drives import store_nine, three_drives

pytestmark = pytest.mark.usefixtures("caplog")

GONE: Final = 1


@pytest.fixture
def pool() -> Iterator[Host]:
    with three_drives(LoopGuard()) as made:
        yield made


def say_removed(pool: Host, drive: int) -> None:
    """Have the header of *drive* say that one is removed."""
    place = pool.drives[drive] / "POOL"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"removed": [GONE]}))


def said_removed(pool: Host) -> list[list[int]]:
    """Return what the headers say, by drive."""
    headers = [json.loads((drive / "POOL").read_text()) for drive in pool.drives]
    return [header.get("removed", []) for header in headers]


@pytest.mark.parametrize("end", ["stop", "kill", "lose_power"])
@pytest.mark.parametrize("told", [(0,), (2,), (0, 2, 1)])
def test_what_one_header_says_is_so(pool: Host, end: str, told: tuple[int, ...]) -> None:
    """The others are told at the next start. No block there is believed, and no number reused."""
    found = store_nine(pool)
    last = max(pool.store.lookup(ROOT_INODE, path[1:]) for path in found[GONE])
    pool.store.sync()
    getattr(pool, end)()
    for drive in told:
        say_removed(pool, drive)
    pool.unnamed.add(GONE)
    store = pool.start()
    assert [said_removed(pool)[drive] for drive in (0, 2)] == [[GONE], [GONE]]
    for path in found[GONE]:
        with pytest.raises(NotFound):
            store.lookup(ROOT_INODE, path[1:])
    assert tree(store) == without(found, GONE)
    drops_all(pool)
    more = [put(store, ROOT_INODE, b"more %d" % number, b"x") for number in range(6)]
    assert drives_of(more) == {0, 2}
    assert min(map(Numbering(3).serial, more)) > Numbering(3).serial(last)
    figures = store.describe()
    assert (figures["missing_drives"], sorted(figures["drives"])) == (0, ["0", "2"])
    assert (figures["blocks"], figures["capacity_bytes"]) == (12, 2 * 64 * MIB)
    assert figures["background_failures"] == 0
    store.sync()
    getattr(pool, end)()
    kept = without(found, GONE) | {b"/more %d" % number: b"x" for number in range(6)}
    assert tree(pool.start()) == kept
    pool.stop()
    report = pool.check()
    assert (report.problems, report.missing, report.blocks) == ([], (), 12)


def test_one_that_is_named_again_is_refused_and_left_as_it_is(pool: Host) -> None:
    """Also if its own header was not told, and if it is the only one that is named."""
    store_nine(pool)
    pool.stop()
    say_removed(pool, 0)
    before = (pool.drives[GONE] / "POOL").read_bytes()
    with pytest.raises(UsageError, match="was removed from its pool, as drive 1: leave it out"):
        pool.start()
    assert (pool.drives[GONE] / "POOL").read_bytes() == before
    say_removed(pool, GONE)
    with pytest.raises(UsageError, match="was removed from its pool"):
        open_drives([str(pool.drives[GONE])])
    pool.unnamed.add(GONE)
    pool.start()


def test_it_is_destroyed_alone_and_the_others_without_it(pool: Host) -> None:
    store_nine(pool)
    pool.stop()
    with pytest.raises(UsageError, match="name all of them"):
        destroy_source(str(pool.drives[GONE]))
    for drive in range(3):
        say_removed(pool, drive)
    with pytest.raises(UsageError, match="is drive 0 of a pool of 2: name all of them"):
        destroy_source(str(pool.drives[0]))
    destroy_source(str(pool.drives[GONE]))
    assert not (pool.drives[GONE] / "POOL").exists()
    pool.unnamed.add(GONE)
    pool.start()
    pool.stop()
    destroy_source(f"{pool.drives[0]},{pool.drives[2]}")
    assert not any((drive / "POOL").exists() for drive in pool.drives)


def test_a_drive_that_cannot_be_told_keeps_none_from_being_removed() -> None:
    """As long as one of the others can be."""
    with host(others_bytes=[64 * MIB] * 2) as pool, open_drives([*map(str, pool.drives)]) as device:
        (pool.drives[0] / "POOL.new").mkdir()
        first, gone, other = device.drives
        with pytest.raises(IsADirectoryError):
            note_removed([first], gone)
        assert said_removed(pool) == [[], [], []]
        note_removed([first, other], gone)
        assert said_removed(pool) == [[], [GONE], [GONE]]
