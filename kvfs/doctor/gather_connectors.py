"""Which connectors work below a mountpoint, and how many bytes each may keep.

Run as a program of its own (``python -m kvfs.doctor.gather_connectors MOUNTPOINT``) with a time
limit: reading another process's environment can wait for an exec of that process, which may wait
for this very mount. It prints each setting and habit as one line of JSON.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Final

from kvfs.client.user_file import read_file
from kvfs.doctor.connector_settings import (
    LMCACHE_CONFIG,
    fails_requests,
    from_command_line,
    from_environment,
    from_settings,
    keeps_a_database,
    keeps_file_per_key,
    serves_below,
)
from kvfs.doctor.facts import ConnectorHabit, ConnectorLimit

#: Settings files are about a page; what is larger is something else.
_FILE_MAX_BYTES: Final = 1 << 20


Said = ConnectorLimit | ConnectorHabit
#: Programs that are not connectors, but have only passed their arguments on.
_LAUNCHERS: Final = frozenset(
    [
        "sh",
        "bash",
        "dash",
        "zsh",
        "fish",
        "ksh",
        "env",
        "sudo",
        "su",
        "tmux",
        "screen",
        "timeout",
        "nohup",
        "setsid",
        "nice",
        "taskset",
        "numactl",
        "systemd",
        "init",
        "tini",
        "dumb-init",
        "supervisord",
        "runsv",
        "login",
        "sshd",
    ]
)


class _Processes:
    """The settings of every process that this one may look at; each is read once."""

    def __init__(self, mountpoint: str) -> None:
        self._mountpoint = mountpoint
        self._said: dict[int, tuple[Said, ...]] = {}
        #: This process and the doctor that runs it, which have the caller's environment.
        self._own = {os.getpid(), os.getppid()}
        self.serves = False

    def said(self) -> Iterator[Said]:
        """Yield the connectors' settings; what a worker inherited from its parent is left out."""
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):  # it ended, or is not ours to look at
                    inherited = self._said_above(int(name))
                    of_it = self._said_by(int(name))
                    yield from (one for one in of_it if one._replace(origin="") not in inherited)

    def _said_above(self, pid: int) -> set[Said]:
        found: set[Said] = set()
        seen = {pid}
        while (pid := _parent(pid)) > 1 and pid not in seen:
            seen.add(pid)
            with contextlib.suppress(OSError):
                found.update(one._replace(origin="") for one in self._said_by(pid))
        return found

    def _said_by(self, pid: int) -> tuple[Said, ...]:
        if pid not in self._said:
            self._said[pid] = ()
            command = _read(f"/proc/{pid}/comm").strip()
            if pid not in self._own and command not in _LAUNCHERS:
                self._said[pid] = tuple(self._look_at(pid, f"process {pid} ({command})"))
        return self._said[pid]

    def _look_at(self, pid: int, origin: str) -> Iterator[Said]:
        mountpoint = self._mountpoint
        words = _read(f"/proc/{pid}/cmdline").rstrip("\0").split("\0")
        self.serves = self.serves or serves_below(words, mountpoint)
        yield from from_command_line(words, mountpoint, origin)
        environ = _read(f"/proc/{pid}/environ")
        environment = {
            name: value for name, _, value in (pair.partition("=") for pair in environ.split("\0"))
        }
        config, path = "", ""
        if file := environment.get(LMCACHE_CONFIG):
            path = os.path.join(os.readlink(f"/proc/{pid}/cwd"), file)
            with contextlib.suppress(OSError):
                config = _read(path)
        yield from from_environment(environment, mountpoint, origin, config, path)
        yield from keeps_file_per_key(environment, mountpoint, origin)
        for habit in keeps_a_database(environment, mountpoint, origin):
            if not _goes_together(habit.command):
                yield habit
        of_lmcache = [value for name, value in environment.items() if name.startswith("LMCACHE_")]
        yield from fails_requests(words, "\n".join([*of_lmcache, config]), mountpoint, origin)


def said_by_processes(mountpoint: str) -> Iterator[Said]:
    """Yield the settings of connectors that work below *mountpoint*.

    Habits that are ``is_remote`` come last, and only if an `lmcache server` works below it.
    """
    processes = _Processes(mountpoint)
    remote = []
    for one in processes.said():
        if isinstance(one, ConnectorHabit) and one.is_remote:
            remote.append(one)
        else:
            yield one
    if processes.serves:
        yield from remote


def _goes_together(path: str) -> bool:
    """Whether eviction takes all of directory *path* or nothing, or never takes any of it."""
    with contextlib.suppress(OSError):  # it is not there yet, or nothing is set
        return os.getxattr(path, "user.kvfs.evict") in (b"together", b"never")
    return False


def _parent(pid: int) -> int:
    """Return the process that started *pid*, 0 if it is not known (proc_pid_stat(5))."""
    try:
        return int(_read(f"/proc/{pid}/stat").rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def limits_of_file(path: str, mountpoint: str) -> list[ConnectorLimit]:
    """Return the limits in a settings file. Raises OSError."""
    return list(from_settings(_read(path), mountpoint, path))


def _read(path: str) -> str:
    return read_file(path, _FILE_MAX_BYTES).decode(errors="replace")


def main() -> None:
    """Print each setting and habit as soon as it is known."""
    for one in said_by_processes(sys.argv[1]):
        print(json.dumps([type(one).__name__, one._asdict()]), flush=True)


if __name__ == "__main__":
    main()
