"""What says that an inode has its name changes together, in one place, or not at all."""

import ast
import struct
from pathlib import Path
from typing import Final

import pytest

from kvfs.core.changed import Why
from kvfs.core.errors import DeadInode, NotADirectory
from kvfs.core.rewriting import Answer
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.engine.names.tree_change import TreeChange
from tests.support.rules.source_tree import SOURCES, calls_of, shown, tree_of
from tests.support.store.stores import FIFO, Host, assert_exact, make_directory, names, put

USER: Final = 1000

#: What only tree_change.py may call: the rows of a name and its inode, and the counters' rule.
PARTS: Final = frozenset({"counted", "delete_inode", "delete_name", "delete_xattrs", "put_name"})
#: And what it has for an index that no pool has open; who says so counts all names in the end.
ROWS: Final = frozenset({"drop_rows", "put_counts", "put_rows"})
EXCEPTIONS: Final = {
    # No name may be left that leads to what cannot be read; the counts wait for fsck.
    "kvfs/pool/pool_change.py": {"delete_inode", "delete_xattrs"},
    # Before a pool is there, from an index that may be damaged.
    "kvfs/engine/recovery/finish_drafts.py": {"counted", "drop_rows", "put_counts"},
    # A new index, whose names are counted when all are in.
    "kvfs/engine/recovery/rebuild.py": {"drop_rows", "put_counts", "put_rows"},
    # Each problem has a repair of its own, and the last one is the counts.
    "kvfs/engine/recovery/fsck_rows.py": {"drop_rows", "put_counts", "put_rows"},
}


def counts_by_hand(tree: ast.Module) -> set[str]:
    """Return what changes a directory's counts in place: ``record._replace(entries=...)``."""
    return {
        f"{keyword.arg}="
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("._replace")
        for keyword in call.keywords
        if keyword.arg in ("entries", "subdirs")
    }


def parts_of(path: Path) -> set[str]:
    tree = tree_of(path)
    return set(calls_of(tree)) & (PARTS | ROWS) | counts_by_hand(tree)


def test_a_name_and_what_goes_with_it_change_in_one_place() -> None:
    found = {shown(path): parts for path in SOURCES if (parts := parts_of(path))}
    everything = found.pop("kvfs/engine/names/tree_change.py")
    assert everything == PARTS | {"drop_rows", "entries=", "put_rows", "subdirs="}
    assert found == EXCEPTIONS


def state_of(running: Host) -> object:
    """Return what a change that fails must leave as it is."""
    store = running.store
    return (
        store.counters,
        store.node_bytes(USER),
        store.unfinished(),
        store.space.recorded_bytes,
        [store.row(ino) for ino in range(20)],
        names(running),
    )


@pytest.mark.parametrize("to", ["nowhere", "a block"])
def test_a_change_that_fails_in_its_middle_changes_nothing(running: Host, to: str) -> None:
    store = running.store
    block = put(store, ROOT_INODE, b"block", b"x")
    node, record = store.make_node(ROOT_INODE, b"fifo", FIFO, USER, 0)
    store.set_xattr(node, b"user.key", b"value", USER)
    opened = store.open(block, writer=False, truncate=False)
    before = state_of(running)
    target = InodeNo(999) if to == "nowhere" else block
    found = store.record(block)

    def change_all() -> None:
        with TreeChange(store.parts, 1) as change:
            change.unlink(node, record, Why.REMOVED)
            change.unlink(block, found, Why.REMOVED)
            change.link(InodeNo(998), record._replace(parent=target))

    with pytest.raises(DeadInode if to == "nowhere" else NotADirectory):
        change_all()
    assert state_of(running) == before
    assert store.xattr(node, b"user.key") == b"value"
    store.close(opened, writer=False)
    assert_exact(running)


def test_a_directory_that_cannot_be_packed_changes_nothing_and_ends(running: Host) -> None:
    store = running.store
    directory = make_directory(running, b"empty")
    record = store.record(put(store, ROOT_INODE, b"block", b"x"))
    before = state_of(running)
    with pytest.raises(struct.error), TreeChange(store.parts, 1) as change:
        change.unlink(InodeNo(999), record._replace(parent=directory), Why.REMOVED)
    assert state_of(running) == before
    put(store, ROOT_INODE, b"next", b"x")
    assert_exact(running)


def test_a_directory_whose_name_leads_to_a_new_inode_is_as_it_was(running: Host) -> None:
    """O_TRUNC of a final block: no name comes or goes, so that no listing has changed."""
    store = running.store
    first = put(store, ROOT_INODE, b"block", b"x")
    before = store.directory(ROOT_INODE)
    opened = store.open(first, writer=False, truncate=False)
    assert store.admits_truncating(first, 0, store.opened(first).maker) is Answer.REPLACE
    assert store.lookup(ROOT_INODE, b"block") != first
    assert store.directory(ROOT_INODE) == before
    store.close(opened, writer=False)
