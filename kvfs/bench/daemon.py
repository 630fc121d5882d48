"""What the server behind a mount costs: its CPU time to the nanosecond, and its memory."""

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any, Final

from kvfs.client.subprocesses import program_again
from kvfs.core.errors import BenchFailed
from kvfs.core.sizes import KIB

_MODULE: Final = "kvfs.cli.main"
#: The command for this interpreter, wherever the package is installed.
KVFS: Final = tuple(program_again(_MODULE)[0])
#: CPUCLOCK_SCHED of linux/posix-timers.h: the scheduler's exact sum over all threads, also those
#: that have ended. /proc/PID/stat shows the same in ticks of 10 ms.
_CPUCLOCK_SCHED: Final = 2
#: If the server took less CPU time between two looks, it was idle: only its timers ran.
_QUIET_NS: Final = 300_000
_LOOK_S: Final = 0.02
_SETTLE_S: Final = 3.0


class Daemon:
    """The server of one mount, seen from outside."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        # As clock_getcpuclockid(3) does, which Python does not offer.
        self._clock = (~pid << 3) | _CPUCLOCK_SCHED

    def cpu_ns(self) -> int:
        """Return the CPU time spent so far; raises ``BenchFailed`` when the server is gone."""
        try:
            return time.clock_gettime_ns(self._clock)
        except OSError:
            raise BenchFailed(f"the kvfs server, pid {self.pid}, ended during the run") from None

    def anonymous_bytes(self) -> int:
        """Return RssAnon: the memory that belongs to it alone."""
        return parse_anonymous(Path(f"/proc/{self.pid}/status").read_text())

    def settle(self) -> None:
        """Wait until its background work is done, for at most three seconds."""
        give_up_s = time.monotonic() + _SETTLE_S
        before_ns = self.cpu_ns()
        while time.monotonic() < give_up_s:
            time.sleep(_LOOK_S)
            now_ns = self.cpu_ns()
            if now_ns - before_ns < _QUIET_NS:
                return
            before_ns = now_ns


def parse_anonymous(status: str) -> int:
    """Return the bytes of RssAnon in the text of ``/proc/PID/status``; 0 if it has none."""
    found = re.search(r"^RssAnon:\s*(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * KIB if found else 0


def environment() -> dict[str, str]:
    """Return the environment in which KVFS finds its package."""
    return program_again(_MODULE)[1]


def mount_status(mountpoint: str) -> dict[str, Any]:
    """Return ``kvfs status MOUNT --json``; raises ``BenchFailed`` with its error line."""
    argv = [*KVFS, "status", mountpoint, "--json"]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchFailed(done.stderr.strip().removeprefix("kvfs: "))
    status: dict[str, Any] = json.loads(done.stdout)
    return status
