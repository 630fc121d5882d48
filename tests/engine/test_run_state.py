"""RUN where it cannot be replaced, is lost, or tells of another pool."""

import dataclasses
import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from kvfs.core.errors import IndexDamaged
from kvfs.core.types import FIRST_INODE, ROOT_INODE
from kvfs.storage.inode_numbers import pack_end
from kvfs.storage.run_state import RunState, present_boot_id, read_run_state
from kvfs.storage.syscalls import Syscalls
from tests.support.devices.failing_syscalls import FailingSyscalls
from tests.support.store.stores import FILE, Host, put, settle, tree, write

pytestmark = pytest.mark.usefixtures("caplog")


@pytest.mark.parametrize("refused", ["write", "rename"])
@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_pool_comes_up_where_there_is_no_room_for_another_run_file(
    running: Host, refused: str, end: str
) -> None:
    """Others filled the device of a directory: only who has come up can make room."""
    put(running.store, ROOT_INODE, b"a", b"x" * 5000)
    settle(running.store)
    running.kill() if end == "kill" else running.stop()
    (running.path / "RUN").write_text((running.path / "RUN").read_text() + " " * 100)
    failing = FailingSyscalls([refused], 1, errno.ENOSPC, for_good=True)
    running.start(failing)
    assert failing.failed
    state = read_run_state(running.store.device.pool_fd, Syscalls())
    found = state._replace(age_base_ns=None, index_dir="")
    assert found == RunState(present_boot_id(), clean=False)
    assert state.index_dir == str(running.index_path())
    assert state.age_base_ns is not None
    running.kill()
    assert tree(running.start()) == {b"/a": b"x" * 5000}


@pytest.mark.parametrize("inodes", ["there", "lost"])
def test_a_pool_that_ran_and_lost_its_run_file_is_not_believed(
    running: Host, inodes: str, caplog: pytest.LogCaptureFixture
) -> None:
    put(running.store, ROOT_INODE, b"a", b"x" * 5000)
    settle(running.store)
    running.kill()
    (running.path / "RUN").unlink()
    if inodes == "lost":
        (running.path / "INODES").unlink()
    caplog.clear()
    assert tree(running.start()) == {b"/a": b"x" * 5000}
    assert "its index is rebuilt" in caplog.text
    running.stop()
    assert running.check().problems == []


def test_a_copy_of_a_directory_in_use_is_rebuilt_from_what_is_whole(running: Host) -> None:
    """Its files are of different moments, and no page cache says which: as after a power loss."""
    store, place = running.store, running.path.parent
    put(store, ROOT_INODE, b"whole", b"w" * 5000)
    settle(store)
    draft, _ = store.create(ROOT_INODE, b"half", FILE, 0, 0)
    write(store, draft, b"h" * 5000)
    shutil.copytree(running.path, place / "copy")
    for extent in (running.path / "extents").glob("*/*"):
        for key in os.listxattr(extent):
            copied = place / "copy" / extent.relative_to(running.path)
            os.setxattr(copied, key, os.getxattr(extent, key))
    write(store, draft, b"h" * 5000, 5000)
    store.close(draft, writer=True)
    settle(store)
    running.kill()
    running.path.rename(place / "original")
    (place / "copy").rename(running.path)
    assert tree(running.start()) == {b"/whole": b"w" * 5000}
    running.kill()
    assert tree(running.start()) == {b"/whole": b"w" * 5000}


def test_a_directory_may_be_renamed_after_a_kill(
    running: Host, caplog: pytest.LogCaptureFixture
) -> None:
    put(running.store, ROOT_INODE, b"a", b"x" * 5000)
    running.kill()
    other = running.path.with_name("other")
    running.path.rename(other)
    running.path = other
    running.settings = dataclasses.replace(running.settings, source=str(other))
    caplog.clear()
    assert tree(running.start()) == {b"/a": b"x" * 5000}
    assert "rebuilt" not in caplog.text


def test_numbers_that_the_index_knows_are_given_out_by_nobody(running: Host) -> None:
    """INODES of another pool, or older than the index: its numbers are those of living blocks."""
    put(running.store, ROOT_INODE, b"a", b"x" * 5000)
    running.stop()
    (running.path / "INODES").write_bytes(pack_end(FIRST_INODE))
    with pytest.raises(IndexDamaged, match="INODES: not behind"):
        running.start()
    assert running.check(repair=True).repaired == 1
    running.start()
    put(running.store, ROOT_INODE, b"b", b"y")
    assert tree(running.store) == {b"/a": b"x" * 5000, b"/b": b"y"}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, RunState("boot", clean=True)),
        ({"age_base_ns": -(1 << 61)}, RunState("boot", clean=True, age_base_ns=-(1 << 61))),
        ({"age_base_ns": 1 << 62}, RunState("boot", clean=True)),
        ({"index": "/" + "i" * 4096}, RunState("", clean=False)),
    ],
    ids=["plain", "age", "impossible age", "longer than anybody writes"],
)
def test_what_nobody_writes_into_run_is_not_believed(
    tmp_path: Path, said: dict[str, object], expected: RunState
) -> None:
    (tmp_path / "RUN").write_text(json.dumps({"boot_id": "boot", "clean": True, **said}))
    pool_fd = os.open(tmp_path, os.O_RDONLY)
    assert read_run_state(pool_fd, Syscalls()) == expected
    os.close(pool_fd)
