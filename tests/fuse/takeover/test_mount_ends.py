"""How a mount ends: by SIGTERM, by an umount, under another mount; what is kept then."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.core.mount_name import name_of, socket_path
from kvfs.devices import wait_released
from kvfs.machine import mount_table
from mount.fuse import kernel
from mount.fuse.kernel_mount import OwnMount
from tests.fuse.conftest import require_passthrough
from tests.support.devices.pools import MIB, blank_source
from tests.support.mounts.mounting import Mounted, loop_device, mounted_at, run_kvfs, workplace
from tests.support.mounts.places import blank_place, lines_of, small_mount

pytestmark = pytest.mark.needs_fuse


@pytest.fixture
def place() -> Iterator[Path]:
    with blank_place() as directory:
        yield directory


def test_sigterm_stops_cleanly(place: Path) -> None:
    log = place / "kv.log"
    with small_mount(place, f"--log-file={log}") as mount:
        (mount.path / "block").write_bytes(b"kept")
        os.kill(mount.server_pid, signal.SIGTERM)
        mount._wait_for_server()
        assert not os.path.ismount(mount.path)
        assert not os.path.exists(socket_path(name_of(str(mount.path))))
        assert json.loads((place / "pool" / "RUN").read_text())["clean"] is True
        assert lines_of(log, "SIGTERM: stopping")
        assert lines_of(log, "is unmounted")
        mount.start()
        assert (mount.path / "block").read_bytes() == b"kept"


@pytest.mark.parametrize("path", ["daemon", "passthrough"])
@pytest.mark.parametrize("unused", [True, False])
def test_the_end_of_a_mount_keeps_what_was_closed(place: Path, path: str, unused: bool) -> None:
    """The kernel drops the RELEASEs that wait when a mount goes; nobody could write any more.

    A descriptor on its way through a socket ends without a FLUSH, which would wait for the server.
    """
    with small_mount(place, f"--data-path={path}") as mount:
        block = mount.path / "block"
        one, other = socket.socketpair()
        with one, other:
            with block.open("wb", buffering=0) as file:
                file.write(b"kept")
                socket.send_fds(one, [b"x"], [file.fileno()])
            os.kill(mount.server_pid, signal.SIGSTOP)
            if unused:
                one.close()
                other.close()
                mount_table.unmount(str(mount.path), lazy=False)
            else:
                os.kill(mount.server_pid, signal.SIGTERM)
            os.kill(mount.server_pid, signal.SIGCONT)
            mount._wait_for_server()
        mount.start()
        assert block.exists() == unused
        assert not unused or block.read_bytes() == b"kept"


@pytest.mark.parametrize("detached", [True, False])
def test_a_stopping_server_leaves_what_others_mounted_there(place: Path, detached: bool) -> None:
    """Over it, or where it was until it was detached in use: what is there is not ours."""
    with small_mount(place) as mount:
        holder = subprocess.Popen(["cat"], stdin=subprocess.PIPE, cwd=mount.path)
        if detached:
            mount_table.unmount(str(mount.path), lazy=True)
        subprocess.run(["mount", "-t", "tmpfs", "foreign", mount.path], check=True)
        try:
            os.kill(mount.server_pid, signal.SIGTERM)
            mount._wait_for_server()
            there = mount_table.mount_at(str(mount.path))
            assert there is not None
            assert there.source == "foreign"
        finally:
            mount_table.unmount(str(mount.path), lazy=True)
            holder.communicate()


def test_a_mount_that_is_cut_off_makes_nobody_wait(place: Path) -> None:
    """Though it is detached, in use, and somebody has the device open who answers nothing."""
    mountpoint = place / "own"
    mountpoint.mkdir()
    device_fd = kernel.open_device()
    own = OwnMount(device_fd, str(mountpoint))
    kernel.mount(device_fd, str(mountpoint), "test", read_only=False)
    own.begun()
    root_fd = os.open(mountpoint, os.O_PATH)
    try:
        own.unmount()
        assert mount_table.mount_at(str(mountpoint)) is None
        own.cut_off()
        look = f"import os; os.stat('name', dir_fd={root_fd})"
        client = subprocess.run(
            [sys.executable, "-c", look],
            pass_fds=[root_fd],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert "not connected" in client.stderr
        own.cut_off()
    finally:
        own.close()
        os.close(device_fd)
        os.close(root_fd)


def end_and_start(mount: Mounted, end: str) -> None:
    """Let another server come after one that was killed or stopped in use."""
    if end == "killed":
        mount.kill_daemon()
    else:
        os.kill(mount.server_pid, signal.SIGTERM)
        mount._wait_for_server()
    mount.start()


@pytest.mark.parametrize("end", ["killed", "stopped"])
@pytest.mark.parametrize("renamed", [True, False])
def test_who_writes_on_after_the_end_writes_to_no_block(
    place: Path, end: str, renamed: bool
) -> None:
    """Also who had the block open for writing and had written nothing until then."""
    with (
        small_mount(place, "--data-path=passthrough") as mount,
        contextlib.ExitStack() as client,
    ):
        require_passthrough(mount)
        block = mount.path / "block"
        if renamed:
            writing = client.enter_context((mount.path / "new").open("wb", buffering=0))
            writing.write(b"stored")
            (mount.path / "new").rename(block)
        else:
            block.write_bytes(b"stored")
            writing = client.enter_context(block.open("r+b", buffering=0))
        end_and_start(mount, end)
        os.pwrite(writing.fileno(), b"mixed", 1)
        assert os.listdir(mount.path) == []
        with pytest.raises(OSError, match="not connected"):  # the FLUSH of a close
            client.close()


@pytest.mark.needs_loop
@pytest.mark.parametrize("kind", ["block", "image"])
@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_clients_of_an_ended_mount_keep_nobody_out(kind: str, end: str) -> None:
    """What they have open keeps the file system of a drive or image mounted; the next one joins.

    They read on, what they still write to is no block, and its space comes back after them.
    """
    with (
        blank_source(kind) as source,
        workplace("disk") as directory,
        Mounted(source.path, directory / "kv", "--data-path=passthrough") as mount,
        contextlib.ExitStack() as client,
    ):
        require_passthrough(mount)
        block, draft = mount.path / "block", mount.path / "draft"
        (mount.path / "block.tmp").write_bytes(b"stored" * MIB)
        (mount.path / "block.tmp").rename(block)
        reading = client.enter_context(block.open("rb", buffering=0))
        writing = client.enter_context(draft.open("wb", buffering=0))
        writing.write(b"half")
        end_and_start(mount, end)
        assert block.read_bytes() == os.pread(reading.fileno(), 7 * MIB, 0) == b"stored" * MIB
        assert os.listdir(mount.path) == ["block"]
        writing.write(b"more of it")
        run_kvfs("evict", str(block))
        assert os.pread(reading.fileno(), 12, MIB * 6 - 12) == b"storedstored"
        with pytest.raises(OSError, match="not connected"):  # the FLUSH of a close
            client.close()
        mount.stop()
        wait_released(source.path)
        mount.start()
        assert os.listdir(mount.path) == []


@pytest.mark.needs_loop
@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_a_client_of_an_ended_mount_keeps_no_blocks_but_its_own(end: str) -> None:
    """What the kernel had registered for passthrough it keeps until that client closes its file.

    The next server gets the blocks of an evicted extent back all the same.
    """
    with (
        loop_device(512 * MIB, format_xfs=True) as drive,
        workplace("disk") as place,
        mounted_at(place / "xfs", drive) as xfs,
    ):
        (xfs / "pool").mkdir()
        with Mounted(xfs / "pool", place / "kv", "--data-path=passthrough") as mount:
            require_passthrough(mount)
            for number in range(40):
                (mount.path / f"{number}.tmp").write_bytes(bytes(4 * MIB))
                (mount.path / f"{number}.tmp").rename(mount.path / f"{number}")
            with (mount.path / "0").open("rb") as reading:
                end_and_start(mount, end)
                full = os.statvfs(xfs)
                run_kvfs("evict", str(mount.path))
                mount.stop()
                given_back = (os.statvfs(xfs).f_bfree - full.f_bfree) * full.f_frsize
                # Less what the pool's directories, its log and a copy of its index take meanwhile.
                assert given_back > 39 * 4 * MIB - 3 * MIB
                assert len(reading.read()) == 4 * MIB
