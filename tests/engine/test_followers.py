"""What must agree with the index hears of each change from one place, after the commit."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.core.changed import Changed, Why
from kvfs.core.types import ROOT_INODE, InodeNo, InodeRecord
from tests.support.devices.failing_syscalls import FailingSyscalls
from tests.support.rules.source_tree import SOURCES, shown, tree_of
from tests.support.store.driven_faults import add_follower
from tests.support.store.store_workload import work
from tests.support.store.stores import MIB, Host, assert_exact, host, make_directory, put, settle

#: What tells a table of a change, by the name under which the product knows the table.
TELLING: Final = {
    "figures": {"closed", "evicted", "removed", "renamed", "stored"},
    "forecast": {"note_published"},
    "heat": {"drop", "evicted", "put"},
    "identities": {"note_attributes", "publish", "withdraw", "write"},
    "leases": {"drop", "follow", "put"},
    "node_shares": {"come", "go", "set_attributes"},
    "pins": {"drop", "move", "set"},
    "policies": {"clear", "note_ttl"},
    "ranks": {"enter", "follow", "keep"},
}
#: Who does so without a change of the index.
EXCEPTIONS: Final = {
    # A lease of what the index knows no more: the table was wrong.
    "kvfs/engine/blocks/lease_ends.py": {"leases.drop"},
    # The last look at a victim finds that its rank is out of date.
    "kvfs/engine/eviction/victims.py": {"heat.drop", "ranks.enter", "ranks.keep"},
    # After a start the tables are filled from the index.
    "kvfs/engine/eviction/start_scan.py": {
        "heat.drop",
        "leases.follow",
        "policies.note_ttl",
        "ranks.follow",
    },
    # A reader keeps what lost its name; a power loss must not bring the name back.
    "kvfs/engine/names/namespace.py": {"identities.withdraw"},
    # The table's own part.
    "kvfs/pool/rules/ranks.py": {"heat.drop", "heat.evicted", "heat.put"},
    "kvfs/pool/open/ready_by_drive.py": {"forecast.note_published"},
    # There is no index: blocks of a trace.
    "kvfs/bench/simulate/served.py": {"heat.evicted", "heat.put"},
}


def tellings(tree: ast.Module) -> Iterator[str]:
    """Yield each call that tells a table something, such as ``leases.drop``."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            of = call.func.value
            table = of.attr if isinstance(of, ast.Attribute) else getattr(of, "id", "")
            if call.func.attr in TELLING.get(table.lstrip("_"), ()):
                yield f"{table.lstrip('_')}.{call.func.attr}"


def test_nobody_tells_a_table_what_the_index_says() -> None:
    found = {shown(path): parts for path in SOURCES if (parts := set(tellings(tree_of(path))))}
    assert found == EXCEPTIONS


def test_a_telling_is_found_under_each_name(tmp_path: Path) -> None:
    source = tmp_path / "teller.py"
    source.write_text(
        "class Teller:\n"
        "    def tell(self, ino):\n"
        "        self._pool.leases.drop(ino)\n"
        "        self._identities.publish(ino, None)\n"
        "        pins = self.pool.pins\n"
        "        pins.set(ino, 0)\n"
    )
    assert set(tellings(tree_of(source))) == {"leases.drop", "identities.publish", "pins.set"}


class Mirror:
    """A follower more: it knows every inode, from what it was told alone."""

    follows: Final = frozenset(Why)

    def __init__(self) -> None:
        self.records: dict[InodeNo, InodeRecord] = {}

    def follow(self, changed: Changed) -> None:
        if changed.after is None:
            del self.records[changed.ino]
        else:
            assert changed.before is None or changed.ino in self.records
            self.records[changed.ino] = changed.after


class Broken:
    """A follower that fails."""

    follows: Final = frozenset(Why)

    def follow(self, changed: Changed) -> None:
        raise RuntimeError(f"inode {changed.ino}")


def without_times_and_counts(record: InodeRecord) -> InodeRecord:
    """A directory's times and counts follow from what is in it."""
    return record._replace(mtime_ns=0, ctime_ns=0, entries=0, subdirs=0)


def change_all(host: Host, calls: FailingSyscalls, mirror: Mirror) -> None:
    """Change everything, with *mirror* looking on."""
    store = host.store
    mirror.records[ROOT_INODE] = store.record(ROOT_INODE)
    work(host, calls)
    directory = make_directory(host, b"pinned")
    store.set_xattr(directory, b"user.kvfs.evict", b"first")
    for number in range(40):
        put(store, directory, b"%d.tmp" % number, bytes(2 * MIB))
        store.rename(directory, b"%d.tmp" % number, directory, b"%d" % number)
        settle(store)
    assert store.describe()["eviction"]["blocks"] > 0
    known = {ino: without_times_and_counts(row) for ino, row in store.records().items()}
    heard = {ino: without_times_and_counts(row) for ino, row in mirror.records.items()}
    assert heard == known
    assert store.describe()["follow_failures"] == 0


def test_one_more_follower_hears_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    mirror, calls = Mirror(), FailingSyscalls(())
    add_follower(monkeypatch, mirror)
    with host() as made:
        made.start(calls)
        change_all(made, calls, mirror)


def test_one_that_fails_costs_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add_follower(monkeypatch, Broken())
    with host() as made:
        made.start()
        store_one(made)
    assert "not followed (RENAMED)" in caplog.text


def store_one(host: Host) -> None:
    """Store a block whose changes nobody can follow."""
    store = host.store
    ino = put(store, ROOT_INODE, b"a.tmp", b"x" * 5000)
    store.rename(ROOT_INODE, b"a.tmp", ROOT_INODE, b"a")
    assert store.lookup(ROOT_INODE, b"a") == ino
    assert store.describe()["follow_failures"] == 3  # created, closed, renamed
    assert_exact(host)
