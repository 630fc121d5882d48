"""A mount whose server is started again when it dies: which process is which, and their ends."""

import contextlib
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.support.clients.stepping import until
from tests.support.mounts.mounting import CommandFailed, Mounted, wait_gone

#: How long the next server may take on a busy machine before the test gives it up.
RETURN_WAIT_S: Final = 30.0
_LOOK_S: Final = 0.02
_KILLED: Final = re.compile(
    r" server [0-9]+(: it)? was killed( by signal 9)?: starting it again$"
    r"| the supervisor has died: | kvfs\.supervisor: no upgrade: "
    r"| kvfs\.supervisor: the process of which servers are forked: it was killed by signal 9"
)


def skip_without_takeover(mounted: Mounted) -> None:
    """Skip the test where the kernel lets no server take over."""
    if mounted.status()["takeover"] != "possible":
        pytest.skip("no take-over on this kernel")


def children_of(pid: int) -> list[int]:
    """Return the processes that *pid* has started and not reaped."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, task.read_text().split())
    return found


def templates_of(supervisor_pid: int) -> list[int]:
    """Return of them those of which servers are forked (mount/process/template.py)."""
    found = []
    for pid in children_of(supervisor_pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if Path(f"/proc/{pid}/comm").read_text() == "kvfs-template\n":
                found.append(pid)
    return found


class Supervised(Mounted):
    """Such a mount; ``server_pid`` is the server that served last, as far as the test knows."""

    def errors(self) -> list[str]:
        """Return what was logged as an error, but for what a test has brought about."""
        return [line for line in super().errors() if not _KILLED.search(line)]

    def kill_server(self) -> None:
        """Kill the server alone; its supervisor starts another one.

        A thread of it may wait in the kernel until that one serves, so its end is not waited for.
        """
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def server_ends(self, wait_s: float) -> bool:
        """Whether the server that served last ends within *wait_s*."""
        try:
            wait_gone(self.server_pid, self._pidfd, wait_s)
        except AssertionError:
            return False
        return True

    def follow(self, look: Callable[[], object] = lambda: None) -> None:
        """Wait until another server serves, and know it; *look* is called meanwhile, and raises."""
        before = self.server_pid

        def serves() -> bool:
            look()
            try:
                return int(self.status()["server_pid"]) != before
            except CommandFailed:
                return False

        until(serves, f"a server after {before}", RETURN_WAIT_S, pause_s=_LOOK_S)
        self.adopt()
