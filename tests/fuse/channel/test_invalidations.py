"""What the kernel is told of evicted blocks: at once, whoever waits for us in their directory."""

import contextlib
import errno
import os
import select
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Final, NamedTuple

import pytest
import trio

from kvfs.client.liveness import was_killed
from kvfs.client.servers import remove_dead_sockets
from kvfs.core.types import InodeNo
from mount.fuse.kernel import Invalidations
from tests.support.kills.held_up import device_of
from tests.support.mounts.mounting import (
    KVFS,
    ROOT,
    Mounted,
    run_kvfs,
    skip_without_mounts,
    workplace,
)
from tests.support.mounts.places import blank_place, small_mount

pytestmark = pytest.mark.needs_fuse

_WAIT_S: Final = 30.0
BLOCK_BYTES: Final = 4 << 20


@contextlib.contextmanager
def stopped(server_pid: int) -> Iterator[None]:
    """Keep the server from answering."""
    os.kill(server_pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server_pid, signal.SIGCONT)


def in_a_thread(call: Callable[[], object]) -> tuple[threading.Thread, int]:
    """Run *call* in a thread; returns when the thread waits for an answer of the server's."""
    began = threading.Event()
    tids: list[int] = []

    def run() -> None:
        tids.append(threading.get_native_id())
        began.set()
        call()

    thread = threading.Thread(target=run)
    thread.start()
    assert began.wait(_WAIT_S)
    wait_until(lambda: waits_for(tids[0], "request_wait_answer"))
    return thread, tids[0]


def waits_for(tid: int, function: str) -> bool:
    return Path(f"/proc/self/task/{tid}/wchan").read_text() == function


def wait_until(true: Callable[[], bool]) -> None:
    """Look again and again, for a bounded time."""
    never = threading.Event()
    for _ in range(int(_WAIT_S * 100)):
        if true():
            return
        never.wait(0.01)
    raise AssertionError("in vain")


@pytest.fixture
def mounted() -> Iterator[Mounted]:
    skip_without_mounts()
    with blank_place() as place, small_mount(place) as mounted:
        yield mounted


def test_the_kernel_is_told_of_a_gone_inode_whoever_waits_for_us_there(mounted: Mounted) -> None:
    """A server killed between the two would never end otherwise, nor would the waiting call."""
    directory = mounted.path / "d"
    directory.mkdir()
    block = directory / "block"
    block.write_bytes(b"bytes")
    ino, parent = InodeNo(block.stat().st_ino), InodeNo(directory.stat().st_ino)
    with device_of(mounted.server_pid) as device_fd:
        gone, name = Invalidations(device_fd), Invalidations(device_fd)
        with stopped(mounted.server_pid):
            making, _ = in_a_thread((directory / "new").mkdir)
            gone.inode_vanished(ino, parent)
            trio.run(gone.catch_up)
            assert gone.sent == 1
            name.entry_vanished(parent, b"block")
            trio.run(name.catch_up)  # which gives up
            assert name.backlog == 0
            assert name.sent == 0, "the directory is locked, or this test shows nothing"
        trio.run(name.catch_up)
        assert name.sent == 1
        making.join(_WAIT_S)
        for invalidations in (gone, name):
            invalidations.stop()
    assert (directory / "new").is_dir()
    assert block.read_bytes() == b"bytes", "it was not gone, and was looked up again"


def test_an_evicted_block_does_not_exist_any_more(mounted: Mounted) -> None:
    """Though the kernel knew its name and attributes for minutes to come."""
    block = mounted.path / "block"
    (mounted.path / "block.tmp").write_bytes(b"bytes")
    (mounted.path / "block.tmp").rename(block)
    assert block.exists()
    before_ns = mounted.path.stat().st_mtime_ns
    run_kvfs("evict", str(block))
    wait_until(lambda: mounted.status()["invalidations"]["sent"] == 1)
    assert not block.exists()
    assert not os.access(block, os.F_OK)
    assert mounted.path.stat().st_mtime_ns > before_ns
    assert list(mounted.path.iterdir()) == []
    block.write_bytes(b"anew")
    assert block.read_bytes() == b"anew"


@pytest.mark.parametrize("told", [0, 1])
def test_after_the_stop_nothing_is_told_to_what_has_the_devices_number(
    tmp_path: Path, told: int
) -> None:
    """The store lets names go yet when the device is closed, and opens extents."""
    fd = os.open(tmp_path / "extent", os.O_CREAT | os.O_RDWR)
    invalidations = Invalidations(fd)
    for _ in range(told):
        invalidations.entry_vanished(InodeNo(1), b"before")
    wait_until(lambda: invalidations.sent == told)
    size_bytes = os.fstat(fd).st_size
    invalidations.stop()
    invalidations.entry_vanished(InodeNo(1), b"after")
    invalidations.inode_vanished(InodeNo(2), InodeNo(1))
    assert "kvfs-notify" not in [thread.name for thread in threading.enumerate()]
    assert (invalidations.sent, invalidations.skipped) == (told, 2)
    assert os.fstat(fd).st_size == size_bytes
    os.close(fd)


def test_an_evicted_block_has_no_attributes_by_its_old_name(mounted: Mounted) -> None:
    """The kernel still knows the name, and is told of the inode only: it looks again at ESTALE."""
    block = mounted.path / "attributed"
    block.with_suffix(".tmp").write_bytes(bytes(BLOCK_BYTES))
    block.with_suffix(".tmp").rename(block)
    os.setxattr(block, "user.note", b"value")
    assert os.getxattr(block, "user.note") == b"value"
    run_kvfs("evict", str(block))
    for call in (lambda: os.getxattr(block, "user.note"), lambda: os.listxattr(block)):
        with pytest.raises(FileNotFoundError):
            call()


class Telling(NamedTuple):
    """A server that tells of a block that is read, and is held up by somebody who waits for it.

    A draft waits in its directory, which is locked, for readers to be done; what they read has
    lost its name meanwhile. So the notifier's thread keeps a killed server, and its device open.
    """

    mounted: Mounted
    storing: threading.Thread
    failed: list[OSError]
    readers: list[int]

    def kill(self) -> None:
        """Kill the server; returns when all of it but that thread has ended."""
        os.kill(self.mounted.server_pid, signal.SIGKILL)
        wait_until(lambda: was_killed(self.mounted.server_pid))

    def kill_supervisor(self) -> None:
        """Kill what would end the connection."""
        supervisor = self.mounted.supervisor_pid
        pidfd = os.pidfd_open(supervisor)
        os.kill(supervisor, signal.SIGKILL)
        assert select.select([pidfd], [], [], _WAIT_S)[0] == [pidfd]
        os.close(pidfd)

    def assert_ended(self) -> None:
        """Assert that who waits is told so."""
        self.storing.join(_WAIT_S)
        assert [error.errno for error in self.failed] == [errno.ECONNABORTED]


@contextlib.contextmanager
def telling(place: Path) -> Iterator[Telling]:
    (place / "pool").mkdir()
    with contextlib.ExitStack() as stack:
        flags = ("--capacity", "64M", "--set", "room_wait_s=60")
        mounted = stack.enter_context(Mounted(place / "pool", place / "kv", *flags))
        directory = mounted.path / "d"
        directory.mkdir()
        for number in range(12):  # in place: they stay while we live
            (mounted.path / str(number)).write_bytes(bytes(BLOCK_BYTES))
        readers: list[int] = []
        for number in range(3):
            (directory / "tmp").write_bytes(bytes(BLOCK_BYTES))
            (directory / "tmp").rename(directory / f"read{number}")
            reader = os.open(directory / f"read{number}", os.O_RDONLY)
            readers.append(reader)
            stack.callback(close_dead, reader)
        failed: list[OSError] = []
        storing = threading.Thread(target=store_more, args=(directory, failed))
        storing.start()
        wait_until(lambda: is_telling(mounted.server_pid))
        yield Telling(mounted, storing, failed, readers)


@pytest.mark.parametrize(
    "then", [("umount", "--lazy", "KV"), ("umount", "KV"), ("mount", "POOL", "KV")]
)
def test_umount_and_mount_end_the_calls_that_wait_for_a_killed_server(
    then: tuple[str, ...],
) -> None:
    """Where nothing else does: the supervisor was killed, too, and another mount was unmounted."""
    skip_without_mounts()
    with workplace() as place:
        # Started first: who forks later closes our files on the mount, and waits for the server.
        paths = {"KV": str(place / "kv"), "POOL": str(place / "pool")}
        status, command = (
            shlex.join([*KVFS, *(paths.get(word, word) for word in verb)])
            for verb in (("status", "KV"), then)
        )
        umount = subprocess.Popen(
            ["sh", "-c", f"read go; {status}; {command}"],
            stdin=PIPE,
            stderr=PIPE,
            text=True,
            cwd=ROOT,
        )
        with telling(place) as held_up:
            held_up.kill_supervisor()
            held_up.kill()
            assert held_up.storing.is_alive()
            remove_dead_sockets()  # as an umount elsewhere does
            _, said = umount.communicate(timeout=_WAIT_S)
            assert umount.returncode == 0
            assert "is dead; `kvfs umount" in said
            held_up.assert_ended()


def test_another_server_goes_on_while_that_thread_waits() -> None:
    """It has the mount, the pool and the control socket of the one that cannot end."""
    skip_without_mounts()
    with workplace() as place, telling(place) as held_up:
        held_up.kill()
        held_up.mounted.follow_server()
        assert (held_up.mounted.path / "0").read_bytes() == bytes(BLOCK_BYTES)
        for reader in held_up.readers:
            os.close(reader)
        held_up.storing.join(_WAIT_S)
        assert [error.errno for error in held_up.failed] == [errno.ENOSPC]  # what is left stays


def close_dead(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)


def store_more(directory: Path, failed: list[OSError]) -> None:
    """Create files until one waits for room, and until that fails."""
    try:
        for number in range(8):
            with (directory / f"new{number}").open("xb", buffering=0) as file:
                file.write(bytes(BLOCK_BYTES))
    except OSError as error:
        failed.append(error)


def is_telling(server_pid: int) -> bool:
    """Whether a thread of the server waits for a directory's lock."""
    for task in Path(f"/proc/{server_pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            if (task / "wchan").read_text() == "fuse_reverse_inval_entry":
                return True
    return False


def test_who_was_killed_is_known_by_its_state() -> None:
    child = os.fork()
    if not child:
        signal.pause()
    try:
        assert not was_killed(child)
        os.kill(child, signal.SIGKILL)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert was_killed(child)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert not was_killed(child)


def test_what_the_kernel_is_to_be_told_waits_in_a_bounded_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name that is dropped waits for its directory's lock; what is skipped costs a look-up."""
    monkeypatch.setattr("mount.fuse.kernel._BACKLOG_MAX", 2)
    may_go_on, begun = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        begun.set()
        may_go_on.wait(_WAIT_S)

    monkeypatch.setattr("mount.fuse.kernel.notify_inval_entry", hang)
    invalidations = Invalidations(-1)
    invalidations.entry_vanished(InodeNo(1), b"K")
    assert begun.wait(_WAIT_S)
    for ino in range(20):
        invalidations.inode_vanished(InodeNo(100 + ino), InodeNo(1))
    assert (invalidations.backlog, invalidations.skipped) == (2, 18)
    may_go_on.set()
    invalidations.stop()
