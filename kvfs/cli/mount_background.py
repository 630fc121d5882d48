"""Starting the server in the background and waiting until it serves."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Final

from kvfs.cli.dead_place import free_place
from kvfs.cli.progress_bar import progress_bar
from kvfs.cli.ready_pipe import StartOutcome, wait_for_outcome
from kvfs.client.subprocesses import held_back, supervised
from kvfs.core.errors import CommandError, ServeFailed
from kvfs.core.settings import Settings
from kvfs.machine.mount_table import kvfs_at

#: From SIGTERM to SIGKILL for a server that did not come up in time.
_GRACE_S: Final = 10.0


class StartFailed(CommandError):
    """The server failed to start; the command ends with the same line and exit code."""

    def __init__(self, outcome: StartOutcome) -> None:
        super().__init__(outcome.error)
        self.exit_code = outcome.exit_code  # type: ignore[misc]


def start_in_background(settings: Settings, argv: Sequence[str]) -> None:
    """Run ``kvfs *argv*`` again as a server in a session of its own; return once it serves.

    Raises the server's error, or ServeFailed if it reports nothing for start_timeout_s.
    """
    was_dead = kvfs_at(settings.mountpoint) is not None
    reading, writing = os.pipe()
    try:
        with contextlib.closing(os.fdopen(reading, "rb", buffering=0)):
            server = None
            try:
                with held_back():
                    server = _spawn([*argv, "--foreground"], writing)
                    os.close(writing)
                    writing = -1
                _await_ready(server, reading, settings.start_timeout_s)
            except StartFailed:
                raise
            except BaseException:  # also at Ctrl-C, or the server would stay behind
                if server is not None:
                    _stop(server)
                if not was_dead:  # a dead mount stays: nothing is stored below
                    with contextlib.suppress(CommandError):
                        free_place(settings.mountpoint)
                raise
    finally:
        if writing >= 0:
            os.close(writing)


def _spawn(arguments: Sequence[str], ready_fd: int) -> "subprocess.Popen[bytes]":
    command, environment = supervised(arguments, ready_fd)
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=environment,
        pass_fds=[ready_fd],
        start_new_session=True,
    )


def _stop(supervisor: "subprocess.Popen[bytes]") -> None:
    """End the supervisor and its server, by SIGKILL to their process group if they are slow."""
    supervisor.terminate()
    try:
        supervisor.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(supervisor.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            supervisor.wait(_GRACE_S)


def _await_ready(server: "subprocess.Popen[bytes]", reading: int, wait_s: float) -> None:
    try:
        with progress_bar("rebuilding the index") as progress:
            outcome = wait_for_outcome(reading, wait_s, progress)
    except TimeoutError:
        raise ServeFailed(
            f"the mount was not ready after {wait_s:g} s (start_timeout_s) and was stopped"
        ) from None
    if outcome is None:
        exit_code = server.wait(_GRACE_S)
        raise ServeFailed(f"the server exited with code {exit_code} before the mount was ready")
    if outcome.error:
        # The source is free once it has ended; the next command may need it at once.
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_GRACE_S)
        raise StartFailed(outcome)
    server.returncode = 0  # we do not wait for it, of which Popen would warn
