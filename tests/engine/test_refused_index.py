"""An index that cannot be believed is refused in one line and left alone; a repair helps."""

import os
from pathlib import Path

import pytest

from kvfs.core.errors import FormatUnknown, IndexDamaged
from kvfs.core.records import FORMAT_KEY, pack_format
from kvfs.core.types import ROOT_INODE
from kvfs.storage.index import Index
from tests.support.store.stores import (
    MIB,
    Host,
    assert_exact,
    put,
    tree,
)

pytestmark = pytest.mark.usefixtures("caplog")


@pytest.fixture
def running(in_pool: Host) -> Host:
    """Return a host whose index is in the pool."""
    return in_pool


def pool_files(path: Path) -> dict[str, tuple[int, bytes]]:
    """Return every file of the pool with its time and bytes."""
    return {
        str(file): (file.stat().st_mtime_ns, file.read_bytes())
        for file in path.rglob("*")
        if file.is_file()
    }


def spoil_pages(path: Path) -> None:
    with (path / "index" / "data.mdb").open("r+b") as file:
        file.seek(8192)
        file.write(b"\xa5" * 16384)


def spoil_meta(path: Path) -> None:
    with (path / "index" / "data.mdb").open("r+b") as file:
        file.write(b"\xa5" * 8192)


def cut_short(path: Path) -> None:
    os.truncate(path / "index" / "data.mdb", 4096)


def remove_data(path: Path) -> None:
    (path / "index" / "data.mdb").unlink()


def spoil_numbers(path: Path) -> None:
    (path / "INODES").write_bytes(b"not a number")


def remove_root(path: Path) -> None:
    with Index(str(path / "index"), map_size_bytes=64 * MIB, preallocate_bytes=MIB) as index:
        with index.write() as txn:
            txn.delete_inode(ROOT_INODE)
        index.sync()


def zero_pages(path: Path) -> None:
    """LMDB ends the process that reads this, by an assertion."""
    with (path / "index" / "data.mdb").open("r+b") as file:
        for page in range(2, 64):
            file.seek(page * 4096 + 8)
            file.write(bytes(4088))


SPOILERS = pytest.mark.parametrize(
    "spoil",
    [spoil_meta, spoil_pages, zero_pages, cut_short, remove_data, spoil_numbers, remove_root],
)


@SPOILERS
@pytest.mark.parametrize("killed", [False, True])
def test_a_damaged_index_is_refused_in_one_line_and_left_alone(
    running: Host, spoil: object, killed: bool
) -> None:
    assert callable(spoil)
    put(running.store, ROOT_INODE, b"a", b"x")
    if killed:
        running.kill()
    else:
        running.stop()
    spoil(running.path)
    before = pool_files(running.path)
    with pytest.raises(IndexDamaged) as caught:
        running.start()
    line = str(caught.value)
    assert line.startswith(f"{running.path}: ")
    assert "\n" not in line
    assert f"kvfs fsck --repair {running.path}" in line
    assert pool_files(running.path) == before


@SPOILERS
def test_a_repair_brings_back_what_a_damaged_index_held(running: Host, spoil: object) -> None:
    assert callable(spoil)
    ino = put(running.store, ROOT_INODE, b"a", b"x")
    running.stop()
    spoil(running.path)
    assert running.check().problems != []
    assert running.check(repair=True).repaired > 0
    assert running.check().problems == []
    store = running.start()
    assert tree(store) == {b"/a": b"x"}
    assert put(store, ROOT_INODE, b"b", b"y") > ino
    assert_exact(running)


def test_a_page_that_a_later_request_would_read_is_found_at_the_start(running: Host) -> None:
    """LMDB ended the server there (SIGABRT), since a start read the first rows only."""
    for number in range(200):
        put(running.store, ROOT_INODE, b"name %03d" % number, b"x")
    running.stop()
    data = running.path / "index" / "data.mdb"
    whole = data.read_bytes()
    leaves = [at for at in range(8192, len(whole), 4096) if b"name 100" in whole[at : at + 4096]]
    assert leaves
    refused = 0
    for at in leaves:  # some are free pages, which hold what they held
        data.write_bytes(whole[:at] + bytes(4096) + whole[at + 4096 :])
        try:
            running.start()
        except IndexDamaged:
            refused += 1
        else:
            assert len(tree(running.store)) == 200
            running.stop()
        data.write_bytes(whole)
    assert refused


def test_an_unknown_format_is_refused_and_left_alone(running: Host) -> None:
    running.stop()
    index_at = str(running.path / "index")
    with Index(index_at, map_size_bytes=64 * MIB, preallocate_bytes=MIB) as index:
        with index.write() as txn:
            txn._rows[FORMAT_KEY] = pack_format(77)
        index.sync()
    before = pool_files(running.path)
    with pytest.raises(FormatUnknown, match="77"):
        running.start()
    with pytest.raises(FormatUnknown, match="77"):
        running.check()
    assert pool_files(running.path) == before


def test_a_pool_that_was_not_stopped_is_not_mounted_read_only(running: Host) -> None:
    put(running.store, ROOT_INODE, b"a", b"x")
    running.kill()
    before = pool_files(running.path)
    with pytest.raises(IndexDamaged, match="not stopped cleanly"):
        running.start(settings=running.read_only())
    assert pool_files(running.path) == before
