"""A program on a terminal of its own, which can be closed under it."""

import contextlib
import os
import pty
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.support.mounts.mounting import COMMAND_WAIT_S, ROOT


class OnTerminal:
    """A program whose terminal is ours; ``setsid --ctty`` becomes the program itself."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self._ours, theirs = pty.openpty()
        with open(theirs, "r+b", buffering=0) as terminal:
            self.program = subprocess.Popen(
                ["setsid", "--ctty", *command],
                stdin=terminal,
                stdout=terminal,
                stderr=terminal,
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if self.program.poll() is None:
            self.program.kill()
        self.program.wait()

    def lines(self) -> Iterator[str]:
        """Yield each line that the program writes, until it ends."""
        left = b""
        with contextlib.suppress(OSError):  # EIO: nobody has the terminal open any more
            while more := os.read(self._ours, 65_536):
                *lines, left = (left + more).split(b"\n")
                yield from (line.decode(errors="replace").rstrip("\r") for line in lines)

    def close(self) -> None:
        """Close the terminal: the kernel sends SIGHUP, and writes to it fail from now on."""
        if self._ours >= 0:
            os.close(self._ours)
            self._ours = -1

    def ended(self) -> int:
        """Return the exit code, once it has ended."""
        return self.program.wait(COMMAND_WAIT_S)


def seen(terminal: OnTerminal, word: str) -> str:
    """Return the first line with *word*. Raises AssertionError if the program ends before."""
    shown = []
    for line in terminal.lines():
        if word in line:
            return line
        shown.append(line)
    raise AssertionError("\n".join(shown))


def left_in(*directories: Path) -> list[str]:
    """Return every mount, loop device and file that has to do with one of *directories*."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    loops = subprocess.run(["losetup", "--list"], check=True, capture_output=True, text=True)
    lines = [*mounts, *loops.stdout.splitlines()]
    found = [line for line in lines if any(str(one) in line for one in directories)]
    return found + [name for one in directories for name in os.listdir(one)]
