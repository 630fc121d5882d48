"""Starting the server in the background and waiting until it serves.

The server reports to the command in lines of JSON through a pipe: ``{"done": N, "of": N}`` while
the index is rebuilt, and then ``{"ready": true}`` or ``{"error": TEXT, "exit_code": N}``. What the
supervisor and systemd are told is in kvfs/machine/held_files.py.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvfs.cli.dead_place import free_place
from kvfs.cli.follow import ProgressBar, progress_bar
from kvfs.client.subprocesses import held_back, supervised
from kvfs.core.errors import CommandError, ServeFailed
from kvfs.core.settings import Settings
from kvfs.machine.mount_table import kvfs_at

#: From SIGTERM to SIGKILL for a server that did not come up in time.
_GRACE_S: Final = 10.0
_LOOK_AGAIN_S: Final = 0.01
_OUTCOME_MAX_BYTES: Final = 64 * 1024


class StartOutcome(NamedTuple):
    """What the server reported; *error* is empty if it serves."""

    error: str
    exit_code: int


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
        _await_end_of_group(supervisor.pid)


def _await_end_of_group(group: int) -> None:
    """Wait until no process of *group* is left, _GRACE_S at most.

    The server is none of our children: until it has ended too, its mount is one that is served, and
    stays. Only whether a group has members can be asked (kill(2)): its end is told to nobody.
    """
    deadline_s = time.monotonic() + _GRACE_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline_s:
            os.killpg(group, 0)
            time.sleep(_LOOK_AGAIN_S)


def _await_ready(server: "subprocess.Popen[bytes]", reading: int, wait_s: float) -> None:
    try:
        with progress_bar("rebuilding the index", counted=True) as progress:
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


class ReadyPipe:
    """The server's end of the pipe. Only the first report of the end is sent."""

    def __init__(self, fd: int) -> None:
        # Programs that the server starts must not keep the pipe open.
        os.set_inheritable(fd, False)
        self._fd = fd

    @property
    def awaited(self) -> bool:
        """Whether nothing was reported yet."""
        return self._fd >= 0

    def say_progress(self, done: int, total: int) -> None:
        """Report how far the rebuild of the index is."""
        with contextlib.suppress(OSError):  # nobody reads it any more
            os.write(self._fd, json.dumps({"done": done, "of": total}).encode() + b"\n")

    def say_ready(self) -> None:
        """Report that the mount serves, and release the terminal."""
        self._say({"ready": True})
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(null, 2)
        os.close(null)

    def say_failed(self, line: str, exit_code: int) -> None:
        """Report why it does not serve."""
        self._say({"error": line, "exit_code": exit_code})

    def _say(self, message: dict[str, object]) -> None:
        try:
            os.write(self._fd, json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # nobody reads it any more
        finally:
            os.close(self._fd)
            self._fd = -1


def wait_for_outcome(fd: int, wait_s: float, progress: ProgressBar) -> StartOutcome | None:
    """Return the server's report from *fd*; None if it ended without one.

    Raises TimeoutError if it reports nothing for *wait_s*, not even progress.
    """
    deadline_s = time.monotonic() + wait_s
    received = b""
    while len(received) < _OUTCOME_MAX_BYTES:
        line, end, rest = received.partition(b"\n")
        if end:
            message, received = json.loads(line), rest
            if "done" not in message:
                return StartOutcome(str(message.get("error", "")), int(message.get("exit_code", 0)))
            progress(int(message["done"]), int(message["of"]))
            deadline_s = time.monotonic() + wait_s
            continue
        left_s = max(0.0, deadline_s - time.monotonic())
        if not select.select([fd], [], [], left_s)[0]:
            raise TimeoutError
        part = os.read(fd, 4096)
        if not part:
            return None
        received += part
    return None
