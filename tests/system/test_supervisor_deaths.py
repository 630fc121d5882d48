"""What is left when the supervisor dies, or both, or when no server can be had any more.

No call hangs, nothing that was acknowledged is lost, and the next mount takes the dead one's place
(docs/availability.md).
"""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.fuse.conftest import require_passthrough
from tests.support.clients.stamped import seed_of
from tests.support.clients.stepping import until
from tests.support.clients.until_dead import SIZE, store
from tests.support.kernel.calls import read_file
from tests.support.kills.server_kills import (
    FEW_CLIENTS,
    load_of,
    skip_without_takeover,
    steady_load,
)
from tests.support.mounts.mounting import ROOT, run_kvfs, skip_without_mounts, workplace
from tests.support.mounts.supervised import Supervised

pytestmark = [pytest.mark.needs_fuse, pytest.mark.needs_loop]

_CLIENTS: Final = 4
_KEPT: Final = 10
_EVICTED_MIN: Final = 50
#: What a call may end with whose server is gone: the first if it comes later.
_DEAD: Final = (errno.ENOTCONN, errno.ECONNABORTED)
#: A call that is not back by then hangs.
_HANGS_S: Final = 30.0


@contextlib.contextmanager
def clients_at_work(mounted: Supervised) -> Iterator[list["subprocess.Popen[str]"]]:
    """Yield clients that fill the pool and have it evict, until a call of theirs fails."""
    kept = mounted.path / "kept"
    kept.mkdir(exist_ok=True)
    os.setxattr(kept, "user.kvfs.evict", b"never")
    clients = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.support.clients.until_dead",
                str(mounted.path),
                name,
                str(_KEPT),
            ],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for name in (f"client-{number}" for number in range(_CLIENTS))
    ]
    try:
        yield clients
    finally:
        for client in clients:
            client.kill()
            client.communicate()


@pytest.fixture
def mounted() -> Iterator[Supervised]:
    """A small pool in a directory."""
    skip_without_mounts()
    with workplace() as source, workplace("disk") as place:
        (source / "pool").mkdir()
        with Supervised(source / "pool", place / "kv", "--capacity=48MiB") as mount:
            require_passthrough(mount)
            yield mount


def wait_until_full(mounted: Supervised) -> None:
    """Wait until blocks are evicted: then the kernel is told of it, too."""

    def evicts() -> bool:
        return int(mounted.status()["cache"]["evicted"]["space"]["blocks"]) > _EVICTED_MIN

    until(evicts, "blocks are evicted")


def ends_of(clients: list["subprocess.Popen[str]"]) -> list[dict[str, Any]]:
    """Return what each client told at its end; none may hang."""
    told = []
    for client in clients:
        out, _ = client.communicate(timeout=_HANGS_S)
        assert client.returncode == 0, out
        told.append(json.loads(out))
    assert all(end["errno"] in _DEAD for end in told), told
    return told


def look_at_kept(mounted: Supervised, told: list[dict[str, Any]]) -> None:
    """Every block that was acknowledged, and may not be evicted, must be there and whole."""
    for end in told:
        for name in end["acknowledged"]:
            seed_of(read_file(mounted.path / "kept" / name), name, SIZE)


def test_a_killed_supervisor() -> None:
    """[killed-supervisor] No client notices, and status says that the server is alone."""
    skip_without_mounts()
    soak = load_of("passthrough", "full", "directory", most_s=0.4, kinds=FEW_CLIENTS)
    with steady_load(soak, FEW_CLIENTS) as driver:
        mounted = driver.mounted
        skip_without_takeover(mounted)
        driver.next_kill()
        os.kill(mounted.supervisor_pid, signal.SIGKILL)
        until(lambda: mounted.status()["supervisor_pid"] is None, "the server notices")
        driver.watch(1.0)


@pytest.mark.parametrize("rounds", [1, pytest.param(30, marks=pytest.mark.proof)])
@pytest.mark.parametrize("first", ["supervisor", "server"])
def test_both_killed(mounted: Supervised, first: str, rounds: int) -> None:
    """[killed-daemon] Calls end, and the next mount has all that was acknowledged."""
    most_s = 0.0
    for _ in range(rounds):
        with clients_at_work(mounted) as clients:
            wait_until_full(mounted)
            pids = [mounted.supervisor_pid, mounted.server_pid]
            for pid in pids if first == "supervisor" else reversed(pids):
                os.kill(pid, signal.SIGKILL)
            told = ends_of(clients)
        most_s = max(most_s, *(end["took_s"] for end in told))
        mounted.wait_stopped()
        mounted.start()
        look_at_kept(mounted, told)
    print(json.dumps({"killed first": first, "rounds": rounds, "longest call s": round(most_s, 3)}))


def test_no_server_can_be_had(mounted: Supervised) -> None:
    """A broken index: all calls end with one errno, status and log say why, and the cure works."""
    store(str(mounted.path / "before"), "before")
    data = Path(mounted.status()["index_in"]) / "data.mdb"
    broken_at = len(mounted.log_file.read_text())
    with clients_at_work(mounted) as clients:
        wait_until_full(mounted)
        with data.open("r+b") as file:
            file.write(b"\xff" * 65536)
        mounted.kill_server()
        began_s = time.monotonic()
        with contextlib.suppress(OSError):
            os.stat(mounted.path / "another")
        took_s = time.monotonic() - began_s
        told = ends_of(clients)
    print(json.dumps({"calls end after s": round(took_s, 3), "ends": told}))
    assert {end["errno"] for end in told} <= set(_DEAD)
    until(lambda: not os.path.exists(f"/proc/{mounted.supervisor_pid}"), "the supervisor ends")
    with pytest.raises(OSError, match="not connected"):
        os.stat(mounted.path / "before")
    assert "index" in mounted.log_file.read_text()[broken_at:]
    shown = run_kvfs("status", str(mounted.path), check=False)
    assert shown.returncode != 0
    assert "index" in shown.stderr, shown.stderr
    run_kvfs("umount", str(mounted.path), check=False)
    run_kvfs("fsck", "--repair", mounted.source)
    mounted.start()
