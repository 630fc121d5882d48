"""A process that does something step by step: it says where it is and waits to be told to go on.

The child's side imports nothing but the standard library, so that it starts fast; a test says
``with Stepping("tests.support.clients.connector_patterns", "vllm_fs_tier", directory) as child``.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

ROOT: Final = Path(__file__).resolve().parents[3]
#: How many times longer than elsewhere all takes here: a guest that is emulated says so.
SLOWER: Final = float(os.environ.get("KVFS_TEST_SLOWER", "1"))
#: A step that takes longer hangs; the machine may be loaded.
STEP_WAIT_S: Final = 60.0 * SLOWER
_LOOK_AGAIN_S: Final = 0.01


def say(label: str) -> None:
    """In the child: tell the test where this process is, and wait until it says go."""
    os.write(1, label.encode() + b"\n")
    if not os.read(0, 1):
        os._exit(3)  # the test is over


def until(
    holds: Callable[[], bool],
    what: str,
    wait_s: float = STEP_WAIT_S,
    *,
    pause_s: float = _LOOK_AGAIN_S,
) -> None:
    """Wait until *holds* for what no event tells: what the server does at its next tick."""
    pause = threading.Event()
    give_up_s = time.monotonic() + wait_s
    while time.monotonic() < give_up_s:
        if holds():
            return
        pause.wait(pause_s)
    raise AssertionError(f"not within {wait_s} s: {what}")


class Stepping:
    """The test's side of such a process; leaving the context ends it."""

    def __init__(
        self,
        module: str,
        *arguments: str | Path,
        pass_fds: tuple[int, ...] = (),
        prefix: tuple[str, ...] = (),
    ) -> None:
        """Start it; *prefix* is a command that becomes it, such as unshare(1)."""
        # Not above: the child imports this module, too.
        from tests.support.forks.process import Process

        self._process = Process(
            [*prefix, sys.executable, "-m", module, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            pass_fds=pass_fds,
            bufsize=0,
        )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def at(self) -> str | None:
        """Wait until it says where it is; None when it has ended."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        said = b""
        while not said.endswith(b"\n"):
            ready, _, _ = select.select([fd], [], [], STEP_WAIT_S)
            assert ready, f"process {self.pid} says nothing for {STEP_WAIT_S} s after {said!r}"
            part = os.read(fd, 1)
            if not part:
                return None
            said += part
        return said.decode().strip()

    def go(self) -> None:
        """Let it do its next step."""
        assert self._process.stdin is not None
        self._process.stdin.write(b".")

    def to(self, label: str) -> None:
        """Let it go on, once, to the step it calls *label*."""
        self.go()
        assert self.at() == label

    def kill(self) -> None:
        """End it by SIGKILL, and wait for its end."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(STEP_WAIT_S)

    def end(self) -> None:
        """Let it go on to its end, which must be a good one."""
        with contextlib.suppress(BrokenPipeError):
            self.go()
        assert self._process.wait(STEP_WAIT_S) == 0
