"""A server in a pid namespace of its own: every client's number is 0 to it."""

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.mounts.mounting import Mounted


@contextlib.contextmanager
def pid_namespace() -> Iterator[int]:
    """Yield a process whose children are in a new pid namespace; all in it end with the context."""
    with subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", "sh", "-c", "echo; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"\n"
        try:
            yield holder.pid
        finally:
            holder.kill()


class ForeignMount(Mounted):
    """A mount whose server lives in another pid namespace, that of *holder*'s children."""

    def __init__(self, source: str | Path, mountpoint: Path, holder: int, *flags: str) -> None:
        namespace = f"/proc/{holder}/ns/pid_for_children"
        self._namespace = os.readlink(namespace)
        prefix: Sequence[str] = ("nsenter", f"--pid={namespace}")
        super().__init__(source, mountpoint, *flags, prefix=prefix)

    def status(self) -> dict[str, Any]:
        """Return what the server says, with its number in this namespace."""
        told = super().status()
        for name in ("server_pid", "supervisor_pid"):
            told[name] = self._number_here(told[name])
        return told

    def _number_here(self, inner: int) -> int:
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if os.readlink(entry / "ns/pid") != self._namespace:
                    continue
                for line in (entry / "status").read_text().splitlines():
                    if line.startswith("NSpid:") and int(line.split()[-1]) == inner:
                        return int(entry.name)
        raise AssertionError(f"no process {inner} in {self._namespace}")
