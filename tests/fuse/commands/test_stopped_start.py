"""A mount command that gives up: it ends the supervisor, and waits for all that it has started."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from kvfs.cli import mount_background

#: From SIGTERM to SIGKILL here; after that the wait may take as long as it does.
GRACE_S = 0.05
LONG_S = 60.0
#: Goes on at SIGTERM, and says when it does.
DEAF = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"


def test_a_server_that_ends_after_its_supervisor_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until then its mount is one that is served, and would stay."""
    order: list[str] = []
    killed, asked = threading.Event(), threading.Event()
    kill_group = os.killpg

    def killpg(group: int, number: int) -> None:
        if number == signal.SIGKILL:
            monkeypatch.setattr(mount_background, "_GRACE_S", LONG_S)
        kill_group(group, number)
        (asked if number == 0 else killed).set()

    monkeypatch.setattr(mount_background, "_GRACE_S", GRACE_S)
    monkeypatch.setattr(os, "killpg", killpg)
    with (
        subprocess.Popen(
            [sys.executable, "-c", DEAF], stdout=subprocess.PIPE, process_group=0
        ) as supervisor,
        # It stays in the group until it is taken in, which is up to us.
        subprocess.Popen(["sleep", "infinity"], process_group=supervisor.pid) as server,
    ):
        assert supervisor.stdout is not None
        supervisor.stdout.readline()

        def stop() -> None:
            mount_background._stop(supervisor)
            order.append("it has stopped")

        stopping = threading.Thread(target=stop)
        stopping.start()
        assert killed.wait(LONG_S)
        assert asked.wait(5.0), "it asks whether the group has members"
        order.append("the server is taken in")
        assert server.wait() == -signal.SIGKILL
        stopping.join(LONG_S)
    assert order == ["the server is taken in", "it has stopped"]


def test_who_never_ends_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mount_background, "_GRACE_S", GRACE_S)
    with subprocess.Popen(["sleep", "infinity"], process_group=0) as server:
        mount_background._await_end_of_group(server.pid)
        assert server.poll() is None
        server.kill()
