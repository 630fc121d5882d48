"""Which connectors work below a mountpoint, and how many bytes each may keep.

Run as a program of its own (``python -m kvfs.cli.doctor_connectors MOUNTPOINT``): looking at
another process's environment can wait for an exec of that process, which may wait for the very
mount; the caller gives it a bounded time. One line of JSON for each limit.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Final

from kvfs.cli.settings_file import read_file
from kvfs.doctor.connector_settings import (
    LMCACHE_CONFIG,
    from_command_line,
    from_environment,
    from_settings,
)
from kvfs.doctor.facts import ConnectorLimit

#: Settings files are a page; more is something else.
_FILE_MAX_BYTES: Final = 1 << 20


def limits_of_processes(mountpoint: str) -> Iterator[ConnectorLimit]:
    """Yield the limits of every process that this one may look at."""
    for pid in os.listdir("/proc"):
        if pid.isdigit() and int(pid) != os.getpid():
            with contextlib.suppress(OSError):  # it ended, or is not ours to look at
                yield from _limits_of(pid, mountpoint)


def _limits_of(pid: str, mountpoint: str) -> Iterator[ConnectorLimit]:
    command = _read(f"/proc/{pid}/comm").strip()
    origin = f"process {pid} ({command})"
    words = _read(f"/proc/{pid}/cmdline").split("\0")
    yield from from_command_line(words, mountpoint, origin)
    pairs = (pair.partition("=") for pair in _read(f"/proc/{pid}/environ").split("\0"))
    environment = {name: value for name, _, value in pairs}
    yield from from_environment(environment, mountpoint, origin)
    if file := environment.get(LMCACHE_CONFIG):
        path = os.path.join(os.readlink(f"/proc/{pid}/cwd"), file)
        yield from limits_of_file(path, mountpoint)


def limits_of_file(path: str, mountpoint: str) -> list[ConnectorLimit]:
    """Return the limits in a settings file. Raises OSError."""
    return list(from_settings(_read(path), mountpoint, path))


def _read(path: str) -> str:
    return read_file(path, _FILE_MAX_BYTES).decode(errors="replace")


def main() -> None:
    """Print each limit as soon as it is known."""
    for limit in limits_of_processes(sys.argv[1]):
        print(json.dumps(limit._asdict()), flush=True)


if __name__ == "__main__":
    main()
