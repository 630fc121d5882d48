"""``kvfs top``: rates between two looks, as lines of JSON, as tables, and live on a terminal."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.clients.cache_client import CacheClient
from tests.support.forks.process import Process
from tests.support.mounts.mounting import KVFS, ROOT, Mounted, run_kvfs

pytestmark = pytest.mark.needs_fuse

INTERVAL: Final = ("--interval", "0.5")
WAIT_S: Final = 60.0
#: What a terminal is told: colours, and where the cursor goes.
_CONTROL: Final = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture
def busy(mount: Mounted, kv: Path) -> Iterator[CacheClient]:
    """A client that loads one block again and again."""
    client, over = CacheClient(kv), threading.Event()
    client.store("block")

    def load() -> None:
        while not over.is_set():
            client.load("block")

    thread = threading.Thread(target=load)
    thread.start()
    yield client
    over.set()
    thread.join()


def test_json_has_a_line_a_look(mount: Mounted, kv: Path, busy: CacheClient) -> None:
    line = run_kvfs("top", str(mount.path), "--once", "--json", *INTERVAL).stdout
    told: dict[str, Any] = json.loads(line)
    assert told["mountpoint"] == str(mount.path)
    assert told["directories"][kv.name]["hits"] > 0
    assert told["directories"][kv.name]["hit_rate"] == 1
    assert told["total"]["hits"] == told["directories"][kv.name]["hits"]
    assert told["total"]["loaded_bytes"] == pytest.approx(4096 * told["total"]["hits"], rel=0.01)


def test_all_mounts_are_shown_without_one_named(
    mount: Mounted, kv: Path, busy: CacheClient
) -> None:
    printed = run_kvfs("top", "--once", *INTERVAL).stdout
    assert str(mount.path) in printed
    (line,) = (line for line in printed.splitlines() if line.startswith(kv.name))
    assert line.split()[1:3] == ["100.0", "%"]


def test_several_tenants_are_shown_with_what_they_store(
    mount: Mounted, kv: Path, busy: CacheClient
) -> None:
    """One alone is not."""
    line = run_kvfs("top", str(mount.path), "--once", "--json", *INTERVAL).stdout
    assert json.loads(line)["tenants"] == {}
    (mount.path / "team-a").mkdir()
    os.setxattr(mount.path / "team-a", "user.kvfs.tenant", b"1")
    CacheClient(mount.path / "team-a").store("block")
    line = run_kvfs("top", str(mount.path), "--once", "--json", *INTERVAL).stdout
    assert json.loads(line)["tenants"]["/team-a"]["stored_bytes"] == 4096
    printed = run_kvfs("top", str(mount.path), "--once", *INTERVAL).stdout.splitlines()
    (row,) = (line for line in printed if line.startswith("/team-a"))
    assert row.split()[1:3] == ["4", "KiB"]


@pytest.mark.parametrize("columns", [120, 80, 60])
def test_it_is_drawn_live_on_a_terminal(
    mount: Mounted, kv: Path, busy: CacheClient, columns: int
) -> None:
    """Twice at least, until Ctrl-C, which is the usual end."""
    server_side, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns)}
    command = [*KVFS, "top", str(mount.path), "--interval", "0.2"]
    process = Process(
        command, cwd=ROOT, stdin=terminal, stdout=terminal, stderr=terminal, env=environment
    )
    os.close(terminal)
    try:
        # A name may be broken over two lines.
        drawn = _read_until(server_side, lambda text: text.count(kv.name[:10].encode()) >= 2)
        process.send_signal(signal.SIGINT)
        _drain(server_side)
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(server_side)
    shown = _CONTROL.sub(b"", drawn).decode()
    assert "hits/s" in shown
    assert "(all)" in shown
    assert ("evicted/s" in shown) == (columns >= 80)
    assert b"\x1b[?1049h" in drawn, "the screen is its own, and what stood there comes back"


def _read_until(fd: int, enough: Any) -> bytes:  # noqa: ANN401
    drawn = b""
    give_up_s = time.monotonic() + WAIT_S
    while not enough(drawn):
        assert time.monotonic() < give_up_s, drawn
        if select.select([fd], [], [], 1.0)[0]:
            drawn += os.read(fd, 1 << 16)
    return drawn


def _drain(fd: int) -> None:
    """Read what the terminal is still sent: a full one would hold the program up."""
    try:
        while os.read(fd, 1 << 16):
            pass
    except OSError:  # the other side is closed
        return


@pytest.mark.parametrize("interval", ["0", "nan", "-1", "inf"])
def test_an_interval_is_a_time(mount: Mounted, interval: str) -> None:
    refused = run_kvfs("top", str(mount.path), f"--interval={interval}", check=False)
    assert refused.returncode == 2
    assert "give at least 0.1 s" in refused.stderr


def test_where_nothing_is_mounted_it_says_so(tmp_path: Path) -> None:
    refused = run_kvfs("top", str(tmp_path), "--once", check=False)
    assert refused.returncode == 11
