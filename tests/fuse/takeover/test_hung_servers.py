"""Servers that hang: how long each is waited for, and what follows."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from kvfs.machine.held_files import link_pair, send
from mount.supervisor.server import Server
from tests.support.clients.stepping import STEP_WAIT_S
from tests.support.mounts.supervisor_alone import (
    ANOTHER,
    DIE,
    FREEZE,
    HOLD,
    supervised,
    upgrade,
)


def test_by_hand_a_server_that_freezes_is_followed(tmp_path: Path) -> None:
    """As systemd's watchdog has it, but by the time that the server has said."""
    with supervised(tmp_path) as one:
        first = one.told()
        one.tell("SILENT_MAX_S = 1.0; " + HOLD.strip().replace("\n", "; "))
        one.tell(FREEZE, answers=False)
        second = one.told()
        assert second["pid"] != first["pid"]
        assert second["given"].keys() == {"fuse", "abort"}
        one.tell(HOLD)
        assert f"server {first['pid']} says nothing for 1 s: killing it" in one.log()


def test_silence_does_not_count_while_the_supervisor_was_stopped_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a container that is paused: its server could not say anything, and hangs no more."""
    now_s = [100.0]
    monkeypatch.setattr("mount.supervisor.server.time.monotonic", lambda: now_s[0])
    ours, theirs = link_pair()
    server = Server(os.getpid(), ours)
    try:
        for silent_s in (0.25, 0.5):
            now_s[0] += 0.25
            assert server.messages() == []
            assert server.silent_s == silent_s
        now_s[0] += 3600.0
        assert server.messages() == []
        assert server.silent_s == 1.5
        send(theirs, {"alive": {}})
        assert len(server.messages()) == 1
        assert server.silent_s == 0.0
    finally:
        server.close()
        theirs.close()


@pytest.mark.parametrize(("may_be_silent_s", "wait_s"), [(30.0, 5.0), (3600.0, 10.0)])
def test_a_server_that_hangs_has_ten_seconds_to_log_where(
    may_be_silent_s: float, wait_s: float
) -> None:
    """Less, if it may be silent for less than a minute."""
    ours, theirs = link_pair()
    with subprocess.Popen(["sleep", "3600"]) as process:
        server = Server(process.pid, ours)
        try:
            server.silent_s = may_be_silent_s + 1.0
            assert server.abort(may_be_silent_s, 5000.0) == 5000.0 + wait_s
            assert server.killed
            assert server.quiet_since_s == 4999.0 - may_be_silent_s
            assert process.wait(STEP_WAIT_S) == -signal.SIGABRT
        finally:
            process.kill()
            server.close()
            theirs.close()


def test_a_server_that_hangs_before_it_serves_is_followed_after_15_seconds(tmp_path: Path) -> None:
    """Callers wait for it; an upgrade's has less, and then the version before follows."""
    with supervised(tmp_path) as one:
        one.told()
        one.tell(HOLD)
        one.tell(DIE, answers=False)
        hangs = one.told()["pid"]
        began_s = time.monotonic()
        one.tell(FREEZE, answers=False)
        assert one.told()["given"].keys() == {"fuse", "abort"}
        assert time.monotonic() - began_s > 13.0
        one.tell(HOLD)
        assert f"server {hangs} says nothing for 15 s: killing it" in one.log()
        one.tell(upgrade(ANOTHER))
        hangs = one.told()["pid"]
        one.tell(FREEZE, answers=False)
        assert one.told()["upgrades"] == 0
        one.tell("assert 'held_by' not in globals()")
        one.tell(HOLD)
        assert f"server {hangs} says nothing for 5 s: killing it" in one.log()
