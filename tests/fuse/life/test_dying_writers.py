"""Writers that die: of a signal, by an exit, in a write, in a thread, while a child lives on."""

import errno
import fcntl
import mmap
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.storage.extents import Extents
from kvfs.storage.syscalls import Syscalls
from tests.support.clients.callers import Caller
from tests.support.clients.stamped import stamped, state
from tests.support.clients.stepping import Stepping, until
from tests.support.clients.writers import SIZE
from tests.support.kernel.calls import opened, read_file, refused, write_file
from tests.support.mounts.mounting import Mounted

pytestmark = pytest.mark.usefixtures("kvfs_only")
CREATE = os.O_WRONLY | os.O_CREAT
WRITER = "tests.support.clients.writers"
LARGE_BYTES = 64 << 20
#: The server reads a RELEASE, and tells the kernel, within a tick; the machine may be loaded.
GONE_WAIT_S = 10.0


def gone(path: Path) -> None:
    """Wait until *path* is absent, by look-up and by listing, here and elsewhere."""
    until(lambda: not os.path.exists(path), f"{path.name} disappears", GONE_WAIT_S)
    assert path.name not in os.listdir(path.parent)
    with refused(errno.ENOENT):
        os.open(path, os.O_RDONLY)


@pytest.mark.parametrize("name", ["waits", "waits_in_a_thread"])
def test_a_killed_writer_takes_the_name_along(kv: Path, name: str) -> None:
    """[life-torn] Also for a process that has looked it up, and one that has it open."""
    block = kv / "block"
    with Stepping(WRITER, name, block) as writer, Caller() as elsewhere:
        assert writer.at() == "half"
        assert os.path.exists(block)
        assert elsewhere.os("stat", str(block)).st_size == SIZE // 2
        reader = elsewhere.os("open", str(block), os.O_RDONLY)
        writer.kill()
        gone(block)
        with refused(errno.ENOENT):
            elsewhere.os("stat", str(block))
        # Who had it open reads what there was; it has no name.
        assert elsewhere.os("pread", reader, SIZE, 0) == stamped("block", SIZE)[: SIZE // 2]
        assert elsewhere.os("fstat", reader).st_nlink == 0
        elsewhere.os("close", reader)
    write_file(block, stamped("block", SIZE, 1))
    assert read_file(block) == stamped("block", SIZE, 1)


def test_a_killed_writer_leaves_its_files_of_a_unit(kv: Path) -> None:
    """[together] A database recovers from them; without one of them it is dead for good."""
    os.setxattr(kv, "user.kvfs.evict", b"together")
    with Stepping(WRITER, "waits", kv / "block") as writer:
        assert writer.at() == "half"
        writer.kill()
    until(lambda: state(kv / "block") == "published", "closed by its death", GONE_WAIT_S)
    assert read_file(kv / "block") == stamped("block", SIZE)[: SIZE // 2]


def test_a_killed_slab_takes_its_index_along(kv: Path) -> None:
    """[together] A slab made anew at the same size, beside the old index, would give zeros."""
    with Caller() as writer:
        slab = writer.os("open", str(kv / "pool.bin"), os.O_RDWR | os.O_CREAT)
        writer.os("posix_fallocate", slab, 0, SIZE)
        for name in ("manifest.json", "block"):
            write_file(kv / f"{name}.tmp", b"{}")
            (kv / f"{name}.tmp").rename(kv / name)
        os.kill(writer.pid, signal.SIGKILL)
        gone(kv / "pool.bin")
    assert os.listdir(kv) == ["block"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGXCPU])
def test_every_deadly_signal_counts(kv: Path, number: int) -> None:
    """[life-torn] Not SIGKILL alone."""
    with Stepping(WRITER, "waits", kv / "block") as writer:
        assert writer.at() == "half"
        os.kill(writer.pid, number)
        gone(kv / "block")


def test_an_exit_without_close_publishes(kv: Path) -> None:
    """[life-torn] exit(2) closes: the bytes are what the program left."""
    with Stepping(WRITER, "exits", kv / "block") as writer:
        assert writer.at() == "written"
        assert state(kv / "block") == "draft"
        writer.go()
        until(lambda: state(kv / "block") == "published", "published by the exit", GONE_WAIT_S)
    assert read_file(kv / "block") == stamped("block", SIZE)


@pytest.mark.parametrize("name", ["writes_much", "writes_in_a_thread"])
@pytest.mark.parametrize("size_mib", [64, 256])
def test_killed_inside_a_large_write(kv: Path, name: str, size_mib: int) -> None:
    """[life-torn] The write ends or is cut; the name goes either way."""
    if name == "writes_in_a_thread" and size_mib == 256:
        size_mib = 128
    with Stepping(WRITER, name, kv / "block", str(size_mib << 20)) as writer:
        assert writer.at() == "ready"
        writer.to("writing")
        until(lambda: os.stat(kv / "block").st_size > 0, "some of it is written")
        writer.kill()
        gone(kv / "block")


def test_a_forked_child_that_lives_on_keeps_the_draft(kv: Path) -> None:
    """[life-torn] The parent is killed, the child holds the descriptor: a draft until it ends."""
    with Stepping(WRITER, "forked_child_holds", kv / "block") as writer:
        assert writer.at() == "child"
        os.kill(writer.pid, signal.SIGKILL)
        until(lambda: not os.path.exists(kv / "block") or torn(kv / "block"), "torn", GONE_WAIT_S)
        writer.go()
        gone(kv / "block")


def torn(path: Path) -> bool:
    """Whether the server knows that the writer of *path* died."""
    try:
        return state(path) == "torn"
    except FileNotFoundError:
        return True


def test_a_renamed_block_outlives_its_writer(kv: Path) -> None:
    """[life-torn] Killed after the rename, with the descriptor still open: it is final."""
    with Stepping(WRITER, "renames_and_waits", kv / "block") as writer:
        assert writer.at() == "renamed"
        writer.kill()
    until(lambda: state(kv / "block") == "published", "published", GONE_WAIT_S)
    assert read_file(kv / "block") == stamped("block", SIZE)


def test_a_temporary_name_left_behind_is_an_orphan(kv: Path, mount: Mounted) -> None:
    """[life-state] Closed, never renamed, and its writer is gone: an orphan, as status tells."""
    before = mount.status()["states"].get("orphan", {"blocks": 0})["blocks"]
    with Caller() as writer:
        for name in ("K.tmp", "K_12.tmp", ".ab12.tmp", "K.tmp.ab12", "K.tmpab12"):
            fd = writer.os("open", str(kv / name), CREATE, 0o644)
            writer.os("write", fd, b"bytes")
            writer.os("close", fd)
            assert state(kv / name) == "leased"
    for name in os.listdir(kv):
        until(lambda name=name: state(kv / name) == "orphan", f"{name} is an orphan", GONE_WAIT_S)
    assert mount.status()["states"]["orphan"]["blocks"] == before + 5
    os.rename(kv / "K.tmp", kv / "K")
    assert state(kv / "K") == "published"


def test_no_call_hangs_while_writers_execute_and_die(kv: Path) -> None:
    """[life-torn] execve with open drafts, killed at any moment: others go on within a second."""
    slowest: list[float] = []
    finished = threading.Event()

    def look() -> None:
        before = os.times().elapsed
        while not finished.is_set():
            os.path.exists(kv / "block")
            os.listdir(kv)
            now = os.times().elapsed
            slowest.append(now - before)
            before = now

    looker = threading.Thread(target=look)
    looker.start()
    try:
        for number in range(12):
            name = ("execs_closing", "execs", "programs")[number % 3]
            with Stepping(WRITER, name, kv / "block") as writer:
                writer.at()
                if name == "execs_closing":
                    writer.go()
                writer.kill()
            until(lambda: settled(kv / "block"), "published or gone", GONE_WAIT_S)
            if os.path.exists(kv / "block"):
                assert name == "execs_closing"
                assert read_file(kv / "block") == stamped("block", SIZE)
                os.unlink(kv / "block")
    finally:
        finished.set()
        looker.join()
    assert max(slowest) < 5.0, "a call of another process was held up"


def settled(path: Path) -> bool:
    """Whether nobody writes *path* any more."""
    try:
        return state(path) not in ("draft", "torn")
    except FileNotFoundError:
        return True


@pytest.fixture
def extents(mount: Mounted) -> Iterator[Extents]:
    """The extents of the mount's own pool, for a question to the kernel."""
    if not os.path.isdir(mount.source):
        pytest.skip("the extents of a drive are in a file system that is mounted nowhere")
    pool_fd = os.open(mount.source, os.O_RDONLY | os.O_DIRECTORY)
    extents = Extents((pool_fd,), Syscalls(), "tmpfs")
    yield extents
    extents.close()
    os.close(pool_fd)


def test_a_lease_tells_who_uses_an_extent(kv: Path, mount: Mounted, extents: Extents) -> None:
    """[unlink-open] A passthrough reader or mapping is somebody, also one behind a close."""
    if mount.status()["data_path"] != "passthrough":
        pytest.skip("on the daemon path the daemon is the only user of an extent")
    write_file(kv / "block", stamped("block", SIZE))
    ino = os.stat(kv / "block").st_ino

    def in_use() -> bool:
        fd = extents.open(ino, os.O_RDWR)  # type: ignore[arg-type]
        try:
            return extents.in_use(fd)
        finally:
            os.close(fd)

    until(lambda: not in_use(), "the writer's handle is gone")
    with opened(kv / "block", os.O_RDONLY) as fd:
        assert in_use()
        memory = mmap.mmap(fd, SIZE, prot=mmap.PROT_READ)
    assert in_use(), "a mapping that outlives the descriptor"
    assert memory[:] == stamped("block", SIZE)
    memory.close()
    until(lambda: not in_use(), "the mapping's handle is gone")
    fd = extents.open(ino, os.O_RDWR)  # type: ignore[arg-type]
    assert not extents.in_use(fd)
    assert fcntl.fcntl(fd, fcntl.F_GETLEASE) == fcntl.F_UNLCK
    os.close(fd)
