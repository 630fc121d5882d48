"""Who is shut out by a chmod or chown stays so after a power loss, on a real XFS."""

import os
import stat
from collections.abc import Iterator

import pytest

from kvfs.core.inode_rules import blank_record, is_narrowed
from kvfs.core.types import ROOT_INODE, InodeNo
from mount.requests.changes import Changes
from tests.support.devices.power_cuts.power import Cut, Drive, drive
from tests.support.store.counted_desk import CountedDesk
from tests.support.store.driven import Driven, NewAttributes
from tests.support.store.stores import DIRECTORY, put

pytestmark = [pytest.mark.needs_loop, pytest.mark.usefixtures("caplog")]
NARROWER = {
    "mode": NewAttributes(mode=0o600),
    "owner": NewAttributes(uid=1000),
    "group": NewAttributes(gid=1000),
    "all": NewAttributes(mode=0o700, uid=7, gid=8),
}


@pytest.fixture(scope="module")
def powered() -> Iterator[Drive]:
    with drive() as made:
        yield made


@pytest.fixture
def desk(powered: Drive) -> Iterator[CountedDesk]:
    """Files over a store that the test cuts off."""
    made = CountedDesk(powered)
    try:
        yield made
    finally:
        powered.kill()
        made.handles._memory.close()  # it holds a descriptor of its own
        os.close(made.fd)


def sync(store: Driven) -> None:
    store.sync()


def make(store: Driven, kind: str, name: bytes) -> InodeNo:
    """Make what lets everybody in, known to the device so."""
    if kind == "directory":
        ino = store.make_node(ROOT_INODE, name, DIRECTORY, 0, 0)[0]
    else:
        ino = put(store, ROOT_INODE, name, b"bytes")
        store.rename(ROOT_INODE, name, ROOT_INODE, b"-" + name, replace=True)
    store.change(ino, mode=0o777)
    sync(store)
    return ino


@pytest.mark.parametrize("how", NARROWER)
@pytest.mark.parametrize("kind", ["directory", "block"])
async def test_a_narrowing_is_durable_before_its_answer(
    powered: Drive, desk: CountedDesk, kind: str, how: str
) -> None:
    """The identity followed within half a minute: until then a power loss let all in again."""
    ino = make(desk.store, kind, b"%s-%s" % (kind.encode(), how.encode()))
    await Changes(desk.files).change(ino, NARROWER[how])
    wanted = desk.store.record(ino)
    powered.cut(Cut.NOTHING)
    record = powered.start().record(ino)
    assert (record.mode, record.uid, record.gid) == (wanted.mode, wanted.uid, wanted.gid)


async def test_the_former_identity_of_a_block_that_waits_for_its_bytes_does_not_come_back(
    powered: Drive, desk: CountedDesk
) -> None:
    """It said that everybody may read the block, and nothing says yet that the block is whole."""
    ino = make(desk.store, "block", b"K")
    opened = desk.store.open(ino, writer=True, truncate=False)
    os.pwrite(opened.fd, b"BYTES", 0)
    desk.store.close(opened, writer=True)
    desk.store.rename(ROOT_INODE, b"-K", ROOT_INODE, b"L", replace=True)
    await Changes(desk.files).change(ino, NewAttributes(mode=0o600))
    powered.cut(Cut.NOTHING)
    assert powered.start().row(ino) is None


async def test_only_a_narrowing_waits_for_the_device(
    desk: CountedDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = desk.store
    ino = make(store, "block", b"W")
    draft, _ = store.create(ROOT_INODE, b"draft", stat.S_IFREG | 0o666, 0, 0)
    synced: list[int] = []
    store.note_calls(monkeypatch, "durable", synced.append)
    for change in (
        NewAttributes(mode=0o777),
        NewAttributes(mtime_ns=1),
        NewAttributes(uid=0, gid=0),
    ):
        await Changes(desk.files).change(ino, change)
    await Changes(desk.files).change(draft.ino, NewAttributes(mode=0o600))  # nothing to come back
    assert synced == []
    await Changes(desk.files).change(ino, NewAttributes(mode=0o776))
    assert synced == [ino]
    store.close(draft, writer=True)


@pytest.mark.parametrize(
    ("before", "now", "narrower"),
    [(0o755, 0o755, False), (0o644, 0o666, False), (0o666, 0o644, True), (0o177, 0o711, True),
     (0o1777, 0o777, False), (0o777, 0o1777, True)],
)  # fmt: skip
def test_what_narrows(before: int, now: int, narrower: bool) -> None:
    records = [
        blank_record(ROOT_INODE, b"d", stat.S_IFDIR | mode, 1, 2, 0) for mode in (before, now)
    ]
    assert is_narrowed(*records) == narrower
    assert is_narrowed(records[1], records[1]._replace(gid=3))
