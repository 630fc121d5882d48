"""Where the index is: in memory while the pool is served, or in the pool."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.core.types import ROOT_INODE
from kvfs.devices import destroy_source
from kvfs.storage.index_place import is_used
from tests.support.mounts.mounting import mounted_at, workplace
from tests.support.store.stores import MIB, Host, get, host, put, settle, tree

pytestmark = pytest.mark.usefixtures("caplog")

#: More names than fit into 8 MiB, with rows of some 600 bytes.
MANY = 12_000
LONG = b"n" * 200


def test_the_index_leaves_memory_with_a_clean_stop_only(running: Host) -> None:
    memory = Path(running.settings.index_memory_dir)
    put(running.store, ROOT_INODE, b"a", b"x")
    assert Path(running.store.describe()["index_in"]) == running.index_path()
    running.kill()
    assert running.index_path().parent.parent == memory
    running.start()
    running.stop()
    assert list(memory.iterdir()) == []
    assert not (running.path / "index").exists()


def test_an_index_whose_file_somebody_removed_serves_on(running: Host) -> None:
    """It is open still; only how much memory it takes is not known."""
    put(running.store, ROOT_INODE, b"a", b"x")
    shutil.rmtree(running.index_path().parent)
    running.store.describe()
    assert get(running.store, ROOT_INODE, b"a") == b"x"


def test_what_earlier_servers_left_in_memory_is_removed(running: Host) -> None:
    memory = Path(running.settings.index_memory_dir)
    put(running.store, ROOT_INODE, b"a", b"x" * 3000)
    settle(running.store)
    running.kill()
    (running.path / "RUN").unlink()  # nothing leads to it any more
    (memory / "kvfs-other.1").mkdir()
    assert tree(running.start()) == {b"/a": b"x" * 3000}
    assert {path.name for path in memory.iterdir()} == {
        "kvfs-other.1",
        running.index_path().parent.name,
    }


def test_an_index_in_the_pool_moves_to_memory_at_a_clean_start() -> None:
    """As an earlier version left it."""
    with host(index_place="pool") as running:
        put(running.start(), ROOT_INODE, b"a", b"x" * 3000)
        running.kill()
        in_memory = dataclasses.replace(running.settings, index_place="memory")
        store = running.start(settings=in_memory)
        assert store.describe()["index_in"] == "pool"
        running.stop()
        store = running.start(settings=in_memory)
        assert store.describe()["index_in"] != "pool"
        assert not (running.path / "index").exists()
        assert tree(store) == {b"/a": b"x" * 3000}
        running.stop()
        store = running.start()  # and back
        assert store.describe()["index_in"] == "pool"
        assert tree(store) == {b"/a": b"x" * 3000}


def test_an_index_for_which_memory_has_no_room_is_in_the_pool(
    running: Host, caplog: pytest.LogCaptureFixture
) -> None:
    put(running.store, ROOT_INODE, b"a", b"x" * 3000)
    settle(running.store)
    for end in (running.stop, running.lose_power):
        end()
        nowhere = dataclasses.replace(running.settings, index_memory_dir="/dev/null")
        assert tree(running.start(settings=nowhere)) == {b"/a": b"x" * 3000}
        assert "not in memory" in caplog.text
        assert running.store.describe()["index_in"] == "pool"
        settle(running.store)
        caplog.clear()


def test_a_read_only_mount_leaves_nothing_in_memory(running: Host) -> None:
    memory = Path(running.settings.index_memory_dir)
    put(running.store, ROOT_INODE, b"a", b"x")
    running.stop()
    before = (running.path / "RUN").read_bytes()
    assert tree(running.start(settings=running.read_only())) == {b"/a": b"x"}
    running.stop()
    assert list(memory.iterdir()) == []
    assert (running.path / "RUN").read_bytes() == before


def test_a_pool_that_names_what_is_not_its_own_gets_nothing(running: Host) -> None:
    """A pool of somebody else's: only a directory with a name that nobody may list is believed."""
    put(running.store, ROOT_INODE, b"a", b"x" * 3000)
    settle(running.store)
    running.kill()
    theirs = running.path.parent / "theirs"
    theirs.mkdir(mode=0o755)
    shutil.copytree(running.index_path(), theirs / "index")
    run = running.path / "RUN"
    run.write_text(json.dumps({**json.loads(run.read_text()), "index": f"{theirs}/index"}))
    assert tree(running.start()) == {b"/a": b"x" * 3000}
    assert running.index_path() != theirs / "index"
    running.stop()
    assert (theirs / "index" / "data.mdb").exists()


def test_a_pool_that_is_destroyed_leaves_nothing_in_memory(running: Host) -> None:
    running.kill()
    destroy_source(str(running.path))
    assert list(Path(running.settings.index_memory_dir).iterdir()) == []


@pytest.mark.needs_fuse  # a file system of its own is mounted
def test_names_that_memory_has_no_room_for_take_the_place_of_others() -> None:
    """The index cannot grow, so the oldest names go, and no store is refused."""
    with (
        host(capacity_bytes=512 * MIB) as running,
        workplace("disk") as place,
        mounted_at(place / "memory", "-t", "tmpfs", "-o", "size=8m", "kvfs") as memory,
    ):
        running.settings = dataclasses.replace(running.settings, index_memory_dir=str(memory))
        store = running.start()
        for number in range(MANY):
            put(store, ROOT_INODE, b"tmp", b"x")
            store.rename(ROOT_INODE, b"tmp", ROOT_INODE, LONG + b"%06d" % number)
            if number % 64 == 0:
                settle(store)
        assert store.describe()["index_in"].startswith(str(memory))
        assert 1000 < store.evicted_blocks < MANY
        assert get(store, ROOT_INODE, LONG + b"%06d" % (MANY - 1)) == b"x"
        running.stop()
        assert running.check().problems == []
        running.start()
        running.stop()


def test_an_index_that_another_process_has_open_is_left_alone(running: Host) -> None:
    """Another part of a pool of several drives may be served, from what the same RUN names."""
    put(running.store, ROOT_INODE, b"a", b"x")
    running.kill()
    path = running.index_path()
    code = "import lmdb, sys; held = lmdb.open(sys.argv[1], create=False); print(); input()"
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"\n"
        assert is_used(str(path))
        running.start()
        assert running.index_path() != path
        assert (path / "data.mdb").exists()
        running.stop()
        assert (path / "data.mdb").exists()
        other.communicate(b"\n")
    assert not is_used(str(path))
    running.start()
    running.stop()
    assert not path.exists()
