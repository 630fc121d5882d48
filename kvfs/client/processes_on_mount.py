"""Which processes keep a mount busy: their working directory or open files are on it.

Runs as a separate program (``python -m kvfs.client.processes_on_mount MOUNTPOINT``) with a bounded
time. Listing the files of a process can wait for an exec of that process, which may wait for this
very mount.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from typing import Final

from kvfs.machine.file_servers import GANESHA

HOLDERS_MAX: Final = 3
_SERVICE: Final = re.compile(r"/([^/\n]+\.service)$", re.MULTILINE)


def holders(mountpoint: str) -> Iterator[tuple[int, str]]:
    """Yield (pid, command) of each process that holds something on *mountpoint*, servers first.

    Not of this one, nor of the command that runs it: that ends by itself. Reads only links in
    /proc, never the paths themselves.
    """
    own = (os.getpid(), os.getppid())
    commands = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in own:
            with contextlib.suppress(OSError):  # it ended
                commands[name] = _command(name)
    for name, command in sorted(commands.items(), key=lambda one: one[1] != GANESHA):
        with contextlib.suppress(OSError):  # it ended, or may not be looked at
            if any(_on(mountpoint, link) for link in _links(name)):
                yield int(name), command


def described(pid: int, command: str) -> str:
    """Return a line about a holder; for a server with the command that ends it."""
    if command != GANESHA:
        return f"{pid} ({command})"
    service = service_of(pid)
    end = f"systemctl stop {service}" if service else f"kill {pid}"
    return f"{pid} ({command}, an NFS server): `{end}` ends that"


def service_of(pid: int) -> str:
    """Return the systemd service of process *pid*, "" if it is in none (cgroups(7))."""
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="replace") as file:
            found = _SERVICE.search(file.read())
    except OSError:
        return ""
    return found[1] if found is not None else ""


def _links(pid: str) -> Iterator[str]:
    yield os.readlink(f"/proc/{pid}/cwd")
    yield os.readlink(f"/proc/{pid}/root")
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            yield os.readlink(f"/proc/{pid}/fd/{fd}")


def _on(mountpoint: str, link: str) -> bool:
    return link == mountpoint or link.startswith(f"{mountpoint}/")


def _command(pid: str) -> str:
    with open(f"/proc/{pid}/comm", encoding="utf-8", errors="backslashreplace") as file:
        return file.read().strip()


def main() -> None:
    """Print up to HOLDERS_MAX holders, each as soon as it is found."""
    for found, (pid, command) in enumerate(holders(sys.argv[1]), start=1):
        print(described(pid, command), flush=True)
        if found == HOLDERS_MAX:
            return


if __name__ == "__main__":
    main()
