"""The supervisor by itself: what it holds, whom it starts, and what it says; no mount is needed.

Its servers are programs that hold a file as ``fuse``, so that another may follow, and do as told.
"""

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.core.errors import ServeFailed
from mount.supervisor.systemd import Systemd
from tests.support.clients.stepping import STEP_WAIT_S, until
from tests.support.mounts.mounting import ROOT
from tests.support.mounts.supervised import templates_of
from tests.support.mounts.supervisor_alone import (
    ANOTHER,
    DIE,
    HOLD,
    SERVER,
    supervised,
    template_of,
    upgrade,
)


def test_the_next_server_is_given_what_the_dead_one_held(tmp_path: Path) -> None:
    with supervised(tmp_path) as one:
        first = one.told()
        assert (first["restarts"], first["given"]) == (0, {})
        one.tell(HOLD)
        one.tell("held.hold('table', os.memfd_create('old')); held.hold('table', 0)")
        one.tell("held.hold('claim', 0); assert held.drop('claim')")
        one.tell(DIE, answers=False)
        second = one.told()
        assert second["pid"] != first["pid"]
        assert second["restarts"] == 1
        given = second["given"]
        assert (given.pop("fuse"), given.pop("abort")) == (f"{tmp_path}/fuse", f"{tmp_path}/abort")
        assert given.keys() == {"table"}
        assert "memfd" not in given["table"]
        one.tell(HOLD)
        assert one.aborted() == ""
        assert f"server {first['pid']}: it was killed by signal 9: starting it again" in one.log()
        serves = f"server {second['pid']} serves after a pause of 0."
        until(lambda: serves in one.log(), serves)  # the answer to HOLD came before


def test_a_server_that_holds_no_mount_is_not_followed(tmp_path: Path) -> None:
    """As before Linux 6.9, where none can take over: calls end at once."""
    with supervised(tmp_path) as one:
        one.told()
        one.tell(HOLD)
        one.tell("held.drop('fuse')")
        one.tell(DIE, answers=False)
        assert one.wait() == 128 + signal.SIGKILL
        assert one.aborted() == "1"
        assert "calls on it have ended" in one.log()


@pytest.mark.parametrize("how", ["sys.exit(7)", DIE])
def test_when_no_server_can_be_had_calls_end_and_the_log_says_why(tmp_path: Path, how: str) -> None:
    with supervised(tmp_path) as one:
        one.told()
        one.tell(HOLD)
        one.tell(DIE, answers=False)
        starts = 0
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            while one._end.recv(65536):
                starts += 1
                one.tell(f"held.say_fatal('the index is broken', 7); {how}", answers=False)
        assert one.wait() == (7 if "exit" in how else 128 + signal.SIGKILL)
        assert starts >= 2
        assert one.aborted() == "1"
        assert "the index is broken: starting it again" in one.log()
        assert "no server can be had: the mount is dead" in one.log()
        left = (tmp_path / "dead").read_text()
        assert re.fullmatch(r"the index is broken, after \d+ tries; `kvfs .* brings it back", left)


def test_a_clean_end_ends_it_with_the_servers_code(tmp_path: Path) -> None:
    """What it holds is let go before the server closes the pool."""
    held = tmp_path / "held"
    held.write_bytes(b"")
    with supervised(tmp_path) as one:
        one.told()
        one.tell(HOLD)
        one.tell(f"held.hold('pool', os.open({str(held)!r}, os.O_RDONLY))")
        fds = Path(f"/proc/{one.process.pid}/fd")

        def holds() -> bool:
            with contextlib.suppress(FileNotFoundError):  # one was closed just now
                return str(held) in [os.readlink(fd) for fd in fds.iterdir()]
            return False

        until(holds, "it has it")
        one.tell("assert held.say_ended()")
        assert not holds()
        one.tell("sys.exit(12)", answers=False)
        assert one.wait() == ServeFailed.exit_code
        assert one.aborted() == ""


def test_signals_are_handed_on_and_after_a_stop_no_server_follows(tmp_path: Path) -> None:
    with supervised(tmp_path) as one:
        one.told()
        one.tell(HOLD)
        for number, told in ((signal.SIGHUP, "HUP"), (signal.SIGTERM, "TERM")):
            one.process.send_signal(number)
            assert one.told() == told
        one.tell(DIE, answers=False)
        assert one.wait() == 128 + signal.SIGKILL
        assert one.aborted() == "1"


def test_a_stop_while_there_is_no_server_is_told_to_the_next(tmp_path: Path) -> None:
    with supervised(tmp_path) as one:
        one.told()
        one.tell(HOLD)
        one.tell(DIE, answers=False)
        one.told()
        one.process.send_signal(signal.SIGTERM)
        one.tell("import time; time.sleep(0)")  # it is not told yet: it cannot take over twice
        one.tell("held.say_ready('', FORMATS, 0.0)", answers=False)
        assert {one.told(), one.told()} == {"done", "TERM"}


def test_a_first_start_ends_as_its_server_does(tmp_path: Path) -> None:
    for program, code in (("raise SystemExit(5)", 5), ("import os; os.kill(os.getpid(), 15)", -15)):
        with supervised(tmp_path, program=program) as one:
            assert one.wait() == code


def test_a_server_that_cannot_be_started_is_told(tmp_path: Path) -> None:
    main = str(ROOT / "mount" / "supervisor" / "__main__.py")
    done = subprocess.run(
        [sys.executable, "-I", "-S", main, "-1", "", "/no/such/python", "--", "mount"],
        capture_output=True,
        text=True,
        timeout=STEP_WAIT_S,
        check=False,
    )
    assert done.returncode == ServeFailed.exit_code
    assert "the server cannot be started: No such file or directory" in done.stderr


def test_a_server_without_a_supervisor_notices(tmp_path: Path) -> None:
    with supervised(tmp_path) as one:
        pid = one.told()["pid"]
        one.tell(HOLD)
        one.process.kill()
        one.process.wait()
        one.tell("assert held.receive() is None and held.lost and not held.say_alive()")
        os.kill(pid, signal.SIGKILL)


def test_servers_that_are_killed_before_they_serve_are_started_again(tmp_path: Path) -> None:
    """Six times, which takes three seconds; calls do not end."""
    with supervised(tmp_path) as one:
        one.told()
        one.tell(HOLD)
        for _ in range(7):
            one.tell(DIE, answers=False)
            assert one.told()["given"].keys() == {"fuse", "abort"}
        one.tell(HOLD)
        assert one.aborted() == ""


NO_SERVER: Final = "of the new version no server can be had"
FAILED: Final = "held._end.settimeout(60); test.send(held._end.recv(65536))"


def test_another_version_follows_and_serves_on(tmp_path: Path) -> None:
    with supervised(tmp_path) as one:
        first = one.told()
        one.tell(HOLD)
        one.tell(upgrade(ANOTHER))
        second = one.told()
        assert (second["restarts"], second["upgrades"]) == (0, 1)
        assert second["pid"] != first["pid"]
        assert second["given"].keys() == {"fuse", "abort"}
        one.tell("assert held_by == 'another'; held.say_ready('', FORMATS, 0.0)")
        one.tell(DIE, answers=False)
        third = one.told()
        assert (third["restarts"], third["upgrades"]) == (1, 1)
        one.tell("assert held_by == 'another'")
        assert one.aborted() == ""


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (SERVER.replace('WHY, FORMATS = ""', 'WHY, FORMATS = "too old"'), "too old"),
        (
            "raise SystemExit(1)",
            "of the new version no server can be had: it ended with exit code 1",
        ),
    ],
)
def test_one_that_cannot_follow_leaves_the_one_that_serves(
    tmp_path: Path, program: str, why: str
) -> None:
    with supervised(tmp_path) as one:
        first = one.told()
        one.tell(HOLD)
        one.tell(upgrade(program))
        one.tell(FAILED, answers=False)
        assert one.told() == {"upgrade_failed": why}
        assert one.told() == "done"
        one.tell(f"assert os.getpid() == {first['pid']}")
        assert f"no upgrade: {why}" in one.log()


def test_after_one_that_fails_once_it_has_begun_the_version_before_serves(tmp_path: Path) -> None:
    with supervised(tmp_path) as one:
        one.told()
        one.tell(HOLD)
        one.tell(upgrade(ANOTHER))
        one.told()
        one.tell(DIE, answers=False)
        third = one.told()
        assert (third["restarts"], third["upgrades"]) == (1, 0)
        one.tell("assert 'held_by' not in globals(); held.say_ready('', FORMATS, 0.0)")
        assert "the upgrade has failed: the version before serves again" in one.log()


def test_without_a_mount_that_can_go_on_there_is_no_upgrade(tmp_path: Path) -> None:
    with supervised(tmp_path) as one:
        one.told()
        one.tell(HOLD)
        one.tell("held.drop('fuse')")
        one.tell(upgrade(SERVER))
        one.tell(FAILED, answers=False)
        assert "on this kernel" in one.told()["upgrade_failed"]


def test_at_its_signal_the_same_version_reads_its_settings_again(tmp_path: Path) -> None:
    with supervised(tmp_path) as one:
        one.told()
        one.tell(HOLD)
        one.tell("assert held.drop('nothing')")  # it has taken in what was said before
        one.process.send_signal(signal.SIGUSR2)
        assert one.told() == "HUP"


class Notified:
    """A socket in systemd's place."""

    def __init__(self, place: Path) -> None:
        self.path = str(place / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self.fds: list[int] = []

    def until(self, wanted: str) -> list[str]:
        """Return the messages up to the one that begins with *wanted*."""
        came: list[str] = []
        while not came or not came[-1].startswith(wanted):
            assert select.select([self._socket], [], [], STEP_WAIT_S)[0], f"{wanted}, not {came}"
            message, fds, _, _ = socket.recv_fds(self._socket, 65536, 8)
            self.fds += fds
            came.append(message.decode())
        return came

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self._socket.close()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Notified]:
    notified = Notified(tmp_path)
    yield notified
    notified.close()


def test_systemd_hears_of_all_that_happens_and_stores_what_is_held(
    tmp_path: Path, systemd: Notified
) -> None:
    environment = {"NOTIFY_SOCKET": systemd.path, "WATCHDOG_USEC": "300000"}
    with supervised(tmp_path, environment) as one:
        assert one.told()["notify"] is False, "it is not for the server to say"
        one.tell("held.say_alive(done=3, of=9, wait_s=60)")
        told = systemd.until("STATUS=rebuilding the index: 3 of 9 files")
        assert told[-1].endswith("\nEXTEND_TIMEOUT_USEC=60000000")
        one.tell(HOLD)
        told = systemd.until("READY=1")
        assert told[-1] == "READY=1\nSTATUS=serving /pool at /kv"
        stored = [message for message in told if message.startswith("FDSTORE=1")]
        assert stored == [f"FDSTORE=1\nFDNAME=kvfs-{name}\nFDPOLL=0" for name in ("fuse", "abort")]
        assert [os.readlink(f"/proc/self/fd/{fd}") for fd in systemd.fds] == [
            "/memfd:kvfs-counts (deleted)",
            f"{tmp_path}/fuse",
            f"{tmp_path}/abort",
        ]
        assert one.told()["restarts"] == 1, "the first said nothing for 0.3 s, and was killed"
        told = systemd.until("STATUS=the server has died")
        assert "WATCHDOG=1" in told
        one.tell("held.say_ready('again', FORMATS, 0.0)")
        systemd.until("READY=1")
        one.tell("held.say_ended()")
        told = systemd.until("FDSTOREREMOVE=1\nFDNAME=kvfs-abort")
        assert "STOPPING=1" in told
        assert "FDSTOREREMOVE=1\nFDNAME=kvfs-fuse" in told


IMPORTS_FOR_EVER: Final = SERVER.replace("    pass\n", "    signal.pause()\n")


def test_systemd_hears_that_we_live_while_no_server_does(tmp_path: Path, systemd: Notified) -> None:
    environment = {"NOTIFY_SOCKET": systemd.path, "WATCHDOG_USEC": "300000"}
    with supervised(tmp_path, environment, IMPORTS_FOR_EVER) as one:
        for _ in range(3):
            systemd.until("WATCHDOG=1")
        # On a busy machine it takes longer to begin than systemd takes to hear of us.
        until(lambda: len(templates_of(one.process.pid)) == 1, "its template begins")


def test_a_stop_before_there_is_a_server_is_done_at_once(tmp_path: Path) -> None:
    with supervised(tmp_path, program=IMPORTS_FOR_EVER) as one:
        template = template_of(one)
        one.process.send_signal(signal.SIGTERM)
        assert one.wait() == -signal.SIGTERM
        until(lambda: not Path(f"/proc/{template}").exists(), "it ends with us")


def test_what_systemd_kept_is_taken_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it kept for somebody else, or twice, is closed."""
    program = (
        "import os, sys; from mount.supervisor.systemd import Systemd\n"
        "os.environ['LISTEN_PID'] = str(os.getpid())\n"
        "for _ in range(4): os.open('/dev/null', os.O_RDONLY)\n"
        "kept = Systemd(os.environ).kept\n"
        "print(kept, 'LISTEN_FDS' in os.environ, sorted(map(int, os.listdir('/proc/self/fd')))[:5])"
    )
    names = "kvfs-fuse:stored:kvfs-fuse:kvfs-pool"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "LISTEN_FDS": "4", "LISTEN_FDNAMES": names},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "{'fuse': 3, 'pool': 6} False [0, 1, 2, 3, 4]\n"  # 4: the listing
    assert Systemd({"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "kvfs-a"}).kept == {}
