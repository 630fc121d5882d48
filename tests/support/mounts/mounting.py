"""Mounts for tests: start the real command, find out about it, and always clean up.

A test says ``Mounted(source, mountpoint)`` or takes the fixtures of ``tests/fuse/conftest.py``;
nothing here knows how kvfs works inside, it runs ``kvfs`` as an operator does.
"""

import contextlib
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import pytest

from kvfs.client.servers import status_of
from kvfs.core.errors import KvfsError
from tests.support.clients.stepping import SLOWER, until
from tests.support.forks.process import run
from tests.support.mounts.copies import detach_copies

ROOT: Final = Path(__file__).resolve().parents[3]
#: The command as an operator's shell would find it.
KVFS: Final = (sys.executable, "-m", "kvfs.cli.main")
#: Generous, since two shared cores run everything; a test that needs it has failed anyway.
COMMAND_WAIT_S: Final = 90.0 * SLOWER
#: Flip once the passthrough data path is in: from then on a machine that could and does not fails.
PASSTHROUGH_WORKS: Final = True
#: The first kernel with FUSE passthrough.
PASSTHROUGH_KERNEL: Final = (6, 9)
MEMORY_DIRECTORY: Final = Path("/dev/shm")


class CommandFailed(AssertionError):
    """A kvfs command ended with another exit code than 0; the message holds what it printed."""


def why_no_mounts() -> str | None:
    """Return why this machine cannot mount FUSE file systems, or None."""
    if os.geteuid() != 0:
        return "needs root"
    if not os.path.exists("/dev/fuse"):
        return "needs /dev/fuse"
    return None


def skip_without_mounts() -> None:
    """Skip the test where this machine cannot mount; in CI it goes on, and fails."""
    if (why := why_no_mounts()) is not None and os.environ.get("CI") != "true":
        pytest.skip(why)


def kernel_has_passthrough() -> bool:
    """Tell whether this kernel knows FUSE passthrough."""
    major, minor = platform.release().split(".")[:2]
    return (int(major), int("".join(c for c in minor if c.isdigit()))) >= PASSTHROUGH_KERNEL


@contextlib.contextmanager
def workplace(kind: str = "tmpfs") -> Iterator[Path]:
    """Yield a fresh directory that every uid may enter: on ``tmpfs``, or ``disk`` for /tmp's own.

    pytest's own ``tmp_path`` is closed to other uids, so a mount below it could not be tested
    with another caller.
    """
    parent = MEMORY_DIRECTORY if kind == "tmpfs" else Path(tempfile.gettempdir())
    directory = Path(tempfile.mkdtemp(prefix=f"kvfs-test-{os.getpid()}-", dir=parent))
    directory.chmod(0o755)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def mounted_at(path: Path, *arguments: str) -> Iterator[Path]:
    """Mount a file system by mount(8) with *arguments* at the new directory *path*."""
    path.mkdir()
    subprocess.run(["mount", *arguments, path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


@contextlib.contextmanager
def own_tmpfs() -> Iterator[Path]:
    """Yield a directory in a tmpfs that nobody else fills: its statfs tells of it alone."""
    with (
        workplace("disk") as place,
        mounted_at(place / "memory", "-t", "tmpfs", "-o", "size=90%", "kvfs-test") as memory,
    ):
        (memory / "pool").mkdir()
        yield memory / "pool"


@contextlib.contextmanager
def loop_device(size_bytes: int, *, format_xfs: bool = False) -> Iterator[str]:
    """Yield a loop device over a sparse file in memory; blank, or with an XFS."""
    with workplace() as directory:
        image = directory / "image"
        with image.open("wb") as file:
            file.truncate(size_bytes)
        if format_xfs:
            subprocess.run(["mkfs.xfs", "-q", str(image)], check=True)
        shown = subprocess.run(
            ["losetup", "--find", "--show", str(image)], check=True, capture_output=True, text=True
        )
        device = shown.stdout.strip()
        try:
            yield device
        finally:
            subprocess.run(["losetup", "--detach", device], check=True)


def run_kvfs(
    *arguments: str, prefix: Sequence[str] = (), check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run one kvfs command to its end and return what it printed.

    Output goes through files: a server in the background that kept its standard output would
    otherwise hold a pipe open, and the test with it.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        done = run(
            [*prefix, *KVFS, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=ROOT,
            timeout=COMMAND_WAIT_S,
            check=False,
        )
        out.seek(0)
        err.seek(0)
        result = subprocess.CompletedProcess(done.args, done.returncode, out.read(), err.read())
    if check and result.returncode != 0:
        command = f"kvfs {' '.join(arguments)}: exit {result.returncode}"
        raise CommandFailed(f"{command}\n{result.stdout}{result.stderr}")
    return result


def wait_gone(pid: int, pidfd: int, wait_s: float = COMMAND_WAIT_S) -> None:
    """Wait until the process behind *pidfd* has ended; raise AssertionError when it does not."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if not poll.poll(wait_s * 1000):
        msg = f"process {pid} did not end within {wait_s} s"
        raise AssertionError(msg)


class Mounted:
    """A kvfs mount run by the real command; ``path`` is its root while it is started.

    Use it as a context manager: leaving unmounts, by force if need be, and ends the server.
    """

    def __init__(
        self, source: str | Path, mountpoint: Path, *flags: str, prefix: Sequence[str] = ()
    ) -> None:
        self.source = str(source)
        self.path = mountpoint
        self.flags = flags
        self.log_file = mountpoint.with_suffix(".log")
        self.prefix = prefix
        self.server_pid = self.supervisor_pid = 0
        self._pidfd = self._supervisor_pidfd = -1

    def __enter__(self) -> Self:
        self.path.mkdir(exist_ok=True)
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, *more_flags: str) -> None:
        """Mount; returns when it serves. Raises CommandFailed with what the command printed."""
        log = () if "--log-file" in self.flags else ("--log-file", str(self.log_file))
        flags = (*log, *self.flags, *more_flags)
        run_kvfs("mount", self.source, str(self.path), *flags, prefix=self.prefix)
        self.adopt()

    def adopt(self) -> None:
        """Take the server that serves now for this mount's own."""
        self._let_go()
        told = self.status()
        self.server_pid, self.supervisor_pid = told["server_pid"], told["supervisor_pid"]
        self._pidfd = os.pidfd_open(self.server_pid)
        self._supervisor_pidfd = os.pidfd_open(self.supervisor_pid)

    def _let_go(self) -> None:
        for pidfd in (self._pidfd, self._supervisor_pidfd):
            if pidfd >= 0:
                os.close(pidfd)
        self._pidfd = self._supervisor_pidfd = -1

    def stop(self) -> None:
        """Unmount the clean way and wait for the server's end."""
        done = run_kvfs("umount", str(self.path), check=False)
        # A test beside this one, or a container, may have a mount namespace of its own, with a copy
        # of this mount: the server ends with it.
        if "unmounted here, but server" in done.stderr:
            detach_copies(self.path)
        elif done.returncode != 0:
            msg = f"kvfs umount {self.path}: exit {done.returncode}\n{done.stdout}{done.stderr}"
            raise CommandFailed(msg)
        self._wait_for_server()

    def remount(self, *more_flags: str) -> None:
        """Unmount and mount again, with *more_flags* added this once."""
        self.stop()
        self.start(*more_flags)

    def kill_daemon(self) -> None:
        """End the server with SIGKILL and take the dead mount away."""
        self.kill()
        subprocess.run(["umount", "--lazy", str(self.path)], check=False, capture_output=True)

    def kill(self) -> None:
        """End server and supervisor with SIGKILL: nobody serves, and the mount is dead.

        Both hold /dev/fuse: a call while one of them ends would be aborted, not refused.
        """
        self.send_kill()
        wait_gone(self.supervisor_pid, self._supervisor_pidfd)
        self._wait_for_server()

    def send_kill(self) -> None:
        """Send both SIGKILL.

        The supervisor first, which would start another server. That is stopped meanwhile, or it
        would log that the supervisor has died.
        """
        for pidfd, number in (
            (self._pidfd, signal.SIGSTOP),
            (self._supervisor_pidfd, signal.SIGKILL),
            (self._pidfd, signal.SIGKILL),
        ):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)

    def kill_server(self) -> None:
        """End the server alone with SIGKILL; another one takes over (``follow_server``)."""
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        wait_gone(self.server_pid, self._pidfd)

    def follow_server(self) -> None:
        """Adopt the server that has taken over; waits until it answers."""
        before = self.server_pid
        until(lambda: self._server_now() not in (0, before), "another server serves")
        self.adopt()

    def _server_now(self) -> int:
        try:
            return int(self.status()["server_pid"])
        except CommandFailed:
            return 0

    def ask_to_stop(self) -> None:
        """Ask the server to stop, in use or not, as a service manager does (SIGTERM)."""
        signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)

    def wait_stopped(self) -> None:
        """Wait for the end of a server that was asked to stop."""
        self._wait_for_server()

    def status(self) -> dict[str, Any]:
        """Return what ``kvfs status MOUNT --json`` says, by the code of that command.

        A process for each look, hundreds of them, would take minutes. Raises CommandFailed.
        """
        try:
            return status_of(str(self.path))
        except KvfsError as error:
            raise CommandFailed(str(error)) from error

    def requests(self) -> Mapping[str, int]:
        """Return how many requests of each opcode the server has answered."""
        counts: dict[str, int] = self.status()["requests"]
        return counts

    def errors(self) -> list[str]:
        """Return what the server logged as an error, tracebacks included."""
        wrong: list[str] = []
        inside = False
        for line in self.log_file.read_text().splitlines():
            if line[:1].isdigit():  # a line with a time; a traceback's have none
                inside = " ERROR " in line or " CRITICAL " in line
            if inside:
                wrong.append(line)
        return wrong

    def abort(self) -> None:
        """Make every call that waits on this mount fail: the way out of a hung server."""
        if self._pidfd >= 0:
            self.send_kill()
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            device, _, mountpoint = line.split()[2:5]
            if mountpoint == str(self.path):
                minor = device.split(":")[1]
                with contextlib.suppress(OSError):
                    Path(f"/sys/fs/fuse/connections/{minor}/abort").write_text("1")

    def close(self) -> None:
        """Unmount whatever the state, and leave no process behind.

        Raises CommandFailed when a server that runs could not be unmounted the clean way: the test
        left something open on it, or the server is at fault.
        """
        try:
            if self._pidfd >= 0:
                ends_by_itself = self._has_ended()
                try:
                    self.stop()
                except (CommandFailed, subprocess.TimeoutExpired, AssertionError):
                    if not ends_by_itself:
                        raise
        finally:
            self._take_away()

    def _take_away(self) -> None:
        while os.path.ismount(self.path) or self._is_dead():
            command = ["umount", "--lazy", str(self.path)]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode != 0 and os.path.ismount(self.path):
                raise CommandFailed(done.stderr)
        if self._pidfd >= 0:
            self.kill()

    def _has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def _is_dead(self) -> bool:
        try:
            os.lstat(self.path)
        except OSError:
            return self.path.name in os.listdir(self.path.parent)
        return False

    def _wait_for_server(self) -> None:
        wait_gone(self.server_pid, self._pidfd)
        self._let_go()


class Reference:
    """A directory of a native file system in a mount's place: what the tests hold kvfs against."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def remount(self, *_: str) -> None:
        """Do nothing: a native file system needs no proof that it keeps its files."""

    def abort(self) -> None:
        """Do nothing: nobody serves here."""
