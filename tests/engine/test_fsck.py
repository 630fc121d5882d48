"""fsck: each kind of damage is found, told in a line, and repaired to a miss or better."""

import itertools
import os
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from kvfs.core.errors import IndexDamaged
from kvfs.core.lifecycle import State
from kvfs.core.records import COUNTERS_KEY, child_key, inode_key, name_key, xattr_key
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.storage.index import Index
from kvfs.storage.index_transaction import WriteTransaction
from kvfs.storage.inode_numbers import pack_end
from tests.support.store.stores import (
    DIRECTORY,
    MIB,
    SYMLINK,
    Host,
    assert_exact,
    assert_no_strays,
    host,
    put,
    settle,
    tree,
)

Tree = dict[bytes, object]


class Pool(NamedTuple):
    """A stopped pool: /dir/in, /link, /one and /two, and the inodes of all."""

    host: Host
    directory: InodeNo
    inside: InodeNo
    link: InodeNo
    one: InodeNo
    two: InodeNo
    before: Tree

    def change(self, change: Callable[[WriteTransaction], object]) -> None:
        """Change the stopped pool's index."""
        path = str(self.host.path / "index")
        with Index(path, map_size_bytes=64 * MIB, preallocate_bytes=MIB) as index:
            with index.write() as txn:
                change(txn)
            index.sync()

    def less(self, *paths: bytes) -> Tree:
        """Return the tree without *paths* and what lies below them."""
        return {path: what for path, what in self.before.items() if not path.startswith(paths)}


@pytest.fixture
def pool() -> Iterator[Pool]:
    with host(index_place="pool") as made:
        store = made.start()
        directory, _ = store.make_node(ROOT_INODE, b"dir", DIRECTORY, 0, 0)
        inside = put(store, directory, b"in", b"i" * 5000)
        link, _ = store.make_node(ROOT_INODE, b"link", SYMLINK, 0, 0, b"dir/in")
        one = put(store, ROOT_INODE, b"one", b"1" * 9000)
        two = put(store, ROOT_INODE, b"two", b"2")
        store.set_xattr(one, b"user.k", b"v")
        before = tree(store)
        made.stop()
        assert made.check().problems == []
        yield Pool(made, directory, inside, link, one, two, before)


def raw(key: bytes, value: bytes) -> Callable[[WriteTransaction], object]:
    return lambda txn: txn._rows.update({key: value})


def replaced(ino: InodeNo, **fields: object) -> Callable[[WriteTransaction], object]:
    def change(txn: WriteTransaction) -> None:
        record = txn.inode(ino)
        assert record is not None
        txn.put_inode(ino, record._replace(**fields))  # type: ignore[arg-type]

    return change


def extent(pool: Pool, ino: InodeNo) -> str:
    return str(pool.host.extent(ino))


def identity_file(pool: Pool, ino: InodeNo) -> str:
    return str(pool.host.path / "identities" / f"{ino & 0xFF:02x}" / f"{ino:016x}")


def stray(path: str) -> None:
    with open(path, "wb") as file:
        file.write(b"nobody's")


def miscount(txn: WriteTransaction) -> None:
    counters = txn.counters()
    txn.put_counters(counters._replace(blocks=99, used_bytes=1))


def swap_names(pool: Pool) -> Callable[[WriteTransaction], object]:
    """Make the name rows of two blocks lead to one of them."""
    return lambda txn: txn.put_name(ROOT_INODE, b"one", pool.two)


def lose_directory(pool: Pool) -> Callable[[WriteTransaction], object]:
    def change(txn: WriteTransaction) -> None:
        txn.delete_name(ROOT_INODE, b"dir", pool.directory)
        txn.delete_inode(pool.directory)

    return change


def close_circle(pool: Pool) -> Callable[[WriteTransaction], object]:
    """Put a directory into itself."""

    def change(txn: WriteTransaction) -> None:
        txn.delete_name(ROOT_INODE, b"dir", pool.directory)
        replaced(pool.directory, parent=pool.directory)(txn)
        txn.put_name(pool.directory, b"dir", pool.directory)

    return change


class Damage(NamedTuple):
    """What is done to the pool, words of the problem, and the paths that a repair cannot save."""

    do: Callable[[Pool], object]
    words: str
    lost: tuple[bytes, ...] = ()


DAMAGES = {
    "record": Damage(
        lambda pool: pool.change(raw(inode_key(pool.one), b"garbage")), "damaged", (b"/one",)
    ),
    "record of a directory": Damage(
        lambda pool: pool.change(raw(inode_key(pool.directory), b"")), "identity is whole"
    ),
    "record of a symlink": Damage(
        lambda pool: pool.change(raw(inode_key(pool.link), b"garbage")), "identity is whole"
    ),
    "record and identity of a directory": Damage(
        lambda pool: (
            pool.change(raw(inode_key(pool.directory), b"")),
            os.unlink(identity_file(pool, pool.directory)),
        ),
        "damaged",
        (b"/dir",),
    ),
    "record gone": Damage(
        lambda pool: pool.change(lambda txn: txn.delete_inode(pool.one)), "leads to", (b"/one",)
    ),
    "name gone": Damage(
        lambda pool: pool.change(lambda txn: txn.delete_row(name_key(ROOT_INODE, b"one"))),
        "does not lead there",
    ),
    "name damaged": Damage(
        lambda pool: pool.change(raw(name_key(ROOT_INODE, b"one"), b"garbage")),
        "does not lead there",
    ),
    "name leads elsewhere": Damage(
        lambda pool: pool.change(swap_names(pool)), "does not lead there"
    ),
    "name too many": Damage(
        lambda pool: pool.change(lambda txn: txn.put_name(ROOT_INODE, b"three", pool.two)),
        "leads to",
    ),
    "not listed": Damage(
        lambda pool: pool.change(lambda txn: txn.delete_row(child_key(ROOT_INODE, pool.one))),
        "does not lead there",
    ),
    "list damaged": Damage(
        lambda pool: pool.change(raw(child_key(ROOT_INODE, pool.one), b"garbage")),
        "does not lead there",
    ),
    "list too long": Damage(
        lambda pool: pool.change(raw(child_key(ROOT_INODE, InodeNo(999)), b"garbage")), "checksum"
    ),
    "attribute": Damage(
        lambda pool: pool.change(raw(xattr_key(pool.one, b"user.k"), b"garbage")), "checksum"
    ),
    "attribute of nobody": Damage(
        lambda pool: pool.change(lambda txn: txn.put_xattr(InodeNo(999), b"user.k", b"v")),
        "not there",
    ),
    "parent gone": Damage(
        lambda pool: pool.change(lose_directory(pool)), "no way leads there", (b"/dir",)
    ),
    "parents in a circle": Damage(
        lambda pool: pool.change(close_circle(pool)), "no way leads there", (b"/dir",)
    ),
    "counts of a directory": Damage(
        lambda pool: pool.change(replaced(pool.directory, entries=7, subdirs=3)),
        "names and subdirectories",
    ),
    "counters": Damage(lambda pool: pool.change(miscount), "counters"),
    "counters gone": Damage(
        lambda pool: pool.change(lambda txn: txn.delete_row(COUNTERS_KEY)), "counters"
    ),
    "draft": Damage(
        lambda pool: pool.change(replaced(pool.one, state=State.DRAFT)), "draft", (b"/one",)
    ),
    "extent gone": Damage(
        lambda pool: os.unlink(extent(pool, pool.one)), "extent is missing", (b"/one",)
    ),
    "extent cut": Damage(
        lambda pool: os.truncate(extent(pool, pool.one), 8999), "8999 bytes of 9000", (b"/one",)
    ),
    "identity gone": Damage(
        lambda pool: os.removexattr(extent(pool, pool.one), "trusted.kvfs.fixed"), "identity"
    ),
    "identity damaged": Damage(
        lambda pool: os.setxattr(extent(pool, pool.one), "trusted.kvfs.name", b"x"), "identity"
    ),
    "identity out of date": Damage(
        lambda pool: pool.change(replaced(pool.one, mode=0o100600)), "identity"
    ),
    "identity file gone": Damage(
        lambda pool: os.unlink(identity_file(pool, pool.directory)), "identity"
    ),
    "target changed": Damage(
        lambda pool: os.truncate(identity_file(pool, pool.link), 3), "identity"
    ),
    "stray extent": Damage(
        lambda pool: stray(extent(pool, InodeNo(pool.one + 512))), "no inode knows it"
    ),
    "stray identity file": Damage(
        lambda pool: stray(identity_file(pool, InodeNo(pool.directory + 512))),
        "no inode knows it",
    ),
    "numbers behind": Damage(
        lambda pool: (pool.host.path / "INODES").write_bytes(pack_end(pool.one)), "INODES"
    ),
    "numbers damaged": Damage(
        lambda pool: (pool.host.path / "INODES").write_bytes(b"garbage"), "INODES"
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_is_found_and_repaired(pool: Pool, damage: Damage) -> None:
    damage.do(pool)
    found = pool.host.check()
    assert any(damage.words in line for line in found.problems), found.problems
    assert all("\n" not in line for line in found.problems)
    assert found.repaired == 0
    repaired = pool.host.check(repair=True)
    assert repaired.repaired == len(repaired.problems) > 0
    again = pool.host.check()
    assert again.problems == []

    store = pool.host.start()
    assert store.swept
    assert tree(store) == pool.less(*damage.lost)
    blocks = [what for what in tree(store).values() if isinstance(what, bytes)]
    assert again.blocks == len(blocks) - (b"/link" in pool.less(*damage.lost))
    assert_exact(pool.host)
    assert_no_strays(store)
    highest = max(store.records())
    assert put(store, ROOT_INODE, b"next", b"n") > highest
    settle(store)
    pool.host.stop()
    assert pool.host.check().problems == []


def test_a_check_writes_nothing(pool: Pool) -> None:
    for damage in (DAMAGES["name too many"], DAMAGES["stray extent"], DAMAGES["extent cut"]):
        damage.do(pool)
    before = {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in pool.host.path.rglob("*")
    }
    assert len(pool.host.check().problems) >= 3
    assert before == {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in pool.host.path.rglob("*")
    }


@pytest.mark.usefixtures("caplog")
def test_a_pool_that_was_cut_off_is_rebuilt_by_a_repair(pool: Pool) -> None:
    store = pool.host.start()
    put(store, ROOT_INODE, b"late", b"l")
    settle(store)
    pool.host.lose_power()
    assert pool.host.check().problems != []
    assert pool.host.check(repair=True).repaired == 1
    assert pool.host.check().problems == []
    assert tree(pool.host.start()) == pool.before | {b"/late": b"l"}


def test_what_a_kill_leaves_is_no_damage(pool: Pool) -> None:
    store = pool.host.start()
    put(store, ROOT_INODE, b"late", b"l")
    store.create(ROOT_INODE, b"draft", 0o100644, 0, 0)
    pool.host.kill()
    assert pool.host.check().problems == []
    report = pool.host.check(repair=True)
    assert (report.problems, report.repaired) == ([], 0)
    store = pool.host.start(settings=pool.host.read_only())
    assert tree(store) == pool.before | {b"/late": b"l"}


def test_every_page_of_the_index_may_be_zeros(pool: Pool) -> None:
    """LMDB ends the process that reads some of them; fsck lives, and rebuilds."""
    store = pool.host.start()
    for number in range(200):
        put(store, ROOT_INODE, b"%d" % number, b"")
    used_bytes = store.index_file_bytes()
    pool.host.stop()
    data = pool.host.path / "index" / "data.mdb"
    whole = data.read_bytes()
    found = set()
    for at in range(8192, used_bytes, 4096):
        with data.open("r+b") as file:
            file.seek(at)
            file.write(bytes(4096))
        try:
            pool.host.probe_index()
        except IndexDamaged as error:
            found.add(str(error))
        with data.open("r+b") as file:
            file.seek(at)
            file.write(whole[at : at + 4096])
    assert any("SIGABRT" in text for text in found), found
    assert len(found) > 1


def test_an_index_that_reads_well_and_is_broken_inside_is_rebuilt(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """Leaves that say another number than their own: no read sees it, the next write frees it."""
    flags_offset, leaf, page_bytes = 10, 0x02, 4096
    path = pool.host.path / "index" / "data.mdb"
    content = bytearray(path.read_bytes())
    for start in range(2 * page_bytes, len(content), page_bytes):
        (number,) = struct.unpack_from("<Q", content, start)
        (flags,) = struct.unpack_from("<H", content, start + flags_offset)
        if flags == leaf and number == start // page_bytes:
            struct.pack_into("<Q", content, start, number + 1)
    path.write_bytes(content)
    pool.host.probe_index()
    (problem,) = pool.host.check().problems
    assert problem.startswith("index: ")
    assert pool.host.check(repair=True).repaired >= 1
    assert "index rebuilt" in caplog.text
    assert pool.host.check().problems == []
    store = pool.host.start()
    assert tree(store) == pool.before


def test_leaves_in_the_wrong_order_end_the_walk(pool: Pool) -> None:
    """A walk goes on behind its last key: fsck read the same rows again, without end."""
    store = pool.host.start()
    for number in range(200):
        put(store, ROOT_INODE, b"%d" % number, b"")
    pool.host.stop()
    path = pool.host.path / "index" / "data.mdb"
    whole = path.read_bytes()
    leaves = [
        at
        for at in range(8192, len(whole), 4096)
        if struct.unpack_from("<QHH", whole, at)[::2] == (at // 4096, 0x02)
    ]
    found: list[str] = []
    for one, two in itertools.pairwise(leaves):  # some are free pages, which nobody reads
        content = bytearray(whole)
        content[one : one + 4096], content[two : two + 4096] = (
            whole[two : two + 4096],
            whole[one : one + 4096],
        )
        path.write_bytes(content)
        found += pool.host.check().problems
    assert any("more rows than" in problem for problem in found), found


def test_progress_is_told_up_to_the_end(pool: Pool) -> None:
    told: list[tuple[int, int]] = []
    pool.host.check(progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (6, 6)
    assert all(done <= total for done, total in told)
