"""How a mount ends: by SIGTERM, by an umount, under another mount; what is kept then."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs import mount_table
from kvfs.pool_name import name_of, socket_path
from mount import kernel
from tests.support.mounting import Mounted, workplace

pytestmark = pytest.mark.needs_fuse

CAPACITY_BYTES = 256 << 20


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a blank source ``pool`` and a mountpoint ``kv``."""
    with workplace() as directory:
        (directory / "pool").mkdir()
        (directory / "kv").mkdir()
        yield directory


def mounted(place: Path, *flags: str) -> Mounted:
    return Mounted(place / "pool", place / "kv", f"--capacity={CAPACITY_BYTES}", *flags)


def lines_of(path: Path, word: str) -> list[str]:
    """Return the log's lines that hold *word*."""
    return [line for line in path.read_text().splitlines() if word in line]


def test_sigterm_stops_cleanly(place: Path) -> None:
    log = place / "kv.log"
    with mounted(place, f"--log-file={log}") as mount:
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
    with mounted(place, f"--data-path={path}") as mount:
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
                kernel.unmount(str(mount.path), lazy=False)
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
    with mounted(place) as mount:
        holder = subprocess.Popen(["cat"], stdin=subprocess.PIPE, cwd=mount.path)
        if detached:
            kernel.unmount(str(mount.path), lazy=True)
        subprocess.run(["mount", "-t", "tmpfs", "foreign", mount.path], check=True)
        try:
            os.kill(mount.server_pid, signal.SIGTERM)
            mount._wait_for_server()
            there = mount_table.mount_at(str(mount.path))
            assert there is not None
            assert there.source == "foreign"
        finally:
            kernel.unmount(str(mount.path), lazy=True)
            holder.communicate()
