"""The NFS-Ganesha servers that run here: their configuration, and what they have open of a mount.

Runs as a separate program (``python -m kvfs.client.nfs.ganesha MOUNTPOINT``) with a bounded time.
Listing the files of a process can wait for an exec of that process, which may wait for this very
mount. It prints one line of JSON for each server.
"""

import contextlib
import fnmatch
import json
import os
import shlex
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from kvfs.client.nfs.ganesha_config import GaneshaExport, exports_of, includes, parse
from kvfs.client.processes_on_mount import service_of
from kvfs.client.subprocesses import seen_in_time
from kvfs.client.user_file import read_file
from kvfs.machine.file_servers import GANESHA
from kvfs.machine.process_ends import process_ids

#: Where it reads its configuration unless ``-f`` says something else (ganesha.nfsd -h).
CONFIG: Final = "/etc/ganesha/ganesha.conf"
#: Limit for all files together; a configuration has a few pages.
_TEXT_MAX_BYTES: Final = 1 << 20
_LOOK_MAX_S: Final = 1.5


class Configuration(NamedTuple):
    """The text of a configuration, with included files in place of the includes."""

    path: str
    text: str = ""
    files: tuple[str, ...] = ()
    """All its files."""
    unread: str = ""
    """What could not be read, and why; empty if all was read."""
    changed_s: float = 0.0
    """The latest change of its files, in seconds since the epoch."""
    includers: Mapping[str, str] = MappingProxyType({})
    """By included file, the file with its ``%include``, which must be removed first."""


class Ganesha(NamedTuple):
    """A running server."""

    pid: int
    unit: str
    """Its systemd unit; empty if it has none."""
    command: str
    """Its command line, quoted for a shell."""
    configuration: Configuration
    is_here: bool
    """Whether it sees the paths that we see: it runs in this mount namespace."""
    is_older: bool
    """Whether its configuration was changed after it started."""
    open_files: int | None
    """How many files it has open below the mountpoint; None if that is unknown."""
    unknown_files: int = 0
    """Descriptors that could not be checked: closed meanwhile, or no time was left."""


def ganeshas(mountpoint: str) -> tuple[Ganesha, ...]:
    """Return the servers that run here, as far as can be found out in bounded time."""
    found = []
    for line in seen_in_time("kvfs.client.nfs.ganesha", mountpoint):
        said = json.loads(line)
        configuration = Configuration(**said.pop("configuration"))
        files = tuple(configuration.files)
        found.append(Ganesha(configuration=configuration._replace(files=files), **said))
    return tuple(found)


def read_configuration(path: str, *, root: str = "", but: str = "") -> Configuration:
    """Read the configuration at *path* with all that it includes, as new_file of conf_lex.l does.

    Its paths are below *root*. The file *but* is left out. Never raises: the result says what could
    not be read.
    """
    reader = _Reader(os.path.dirname(path), root, but)
    text = reader.read(path)
    return Configuration(
        path, text, tuple(reader.files), reader.unread, reader.changed_s, reader.includers
    )


def exports_below(server: Ganesha, mountpoint: str) -> tuple[GaneshaExport, ...]:
    """Return what *server* exports of *mountpoint* and of what lies below it."""
    return tuple(
        one
        for one in exports_of(parse(server.configuration.text))
        if f"{one.path.rstrip('/')}/".startswith(f"{mountpoint}/")
    )


def restart_of(server: Ganesha) -> str:
    """Return the command that restarts *server*."""
    if server.unit:
        return f"systemctl restart {server.unit}"
    gone = f"while kill -0 {server.pid} 2> /dev/null; do sleep 0.1; done"
    return f"kill {server.pid}; {gone}; {server.command}"


def reload_of(server: Ganesha) -> str:
    """Return the command that makes *server* read its exports again (ganesha-config(8))."""
    return f"systemctl reload {server.unit}" if server.unit else f"kill -HUP {server.pid}"


class _Reader:
    """The files of one configuration; each is read once."""

    def __init__(self, home: str, root: str, but: str) -> None:
        self._home = home
        self._root = root
        self._but = but
        self._left_bytes = _TEXT_MAX_BYTES
        self.files: list[str] = []
        self.unread = ""
        self.changed_s = 0.0
        self.includers: dict[str, str] = {}

    def read(self, path: str) -> str:
        path = os.path.join(self._home, path)  # relative to the first file's directory
        if path in self.files:
            return ""
        self.files.append(path)
        if path == self._but:
            return ""
        try:
            raw = read_file(self._root + path, self._left_bytes)
            self.changed_s = max(self.changed_s, os.stat(self._root + path).st_mtime)
        except OSError as error:
            self._miss(path, error.strerror or str(error))
            return ""
        self._left_bytes -= len(raw)
        if self._left_bytes <= 0:
            self._miss(path, "too long")
        lines = []
        for line in raw.decode(errors="surrogateescape").splitlines():
            found = includes(line)
            lines += [self._included(path, *one) for one in found] if found else [line]
        return "\n".join([*lines, ""])

    def _included(self, includer: str, kind: str, named: str) -> str:
        if kind == "include":
            self.includers[os.path.join(self._home, named)] = includer
            return self.read(named)
        if kind == "url":
            self._miss(named, "is not on this machine")
            return ""
        directory, pattern = os.path.join(self._home, named), "*"
        if set(os.path.basename(named)) & set("*?["):
            directory, pattern = os.path.split(directory)
        try:
            names = sorted(os.listdir(self._root + directory))
        except OSError as error:
            self._miss(named, error.strerror or str(error))
            return ""
        paths = [f"{directory}/{name}" for name in names if fnmatch.fnmatch(name, pattern)]
        return "".join(self.read(path) for path in paths if _is_file(self._root + path))

    def _miss(self, what: str, why: str) -> None:
        self.unread = self.unread or f"{what}: {why}"


def _is_file(path: str) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def _running(mountpoint: str) -> Iterator[Ganesha]:
    until_s = time.monotonic() + _LOOK_MAX_S
    for pid in process_ids():
        with contextlib.suppress(OSError, ValueError):  # it ended, or may not be looked at
            words = _text(f"/proc/{pid}/cmdline").rstrip("\0").split("\0")
            if os.path.basename(words[0]) == GANESHA:
                yield _look_at(pid, words, mountpoint, until_s)


def _look_at(pid: int, words: list[str], mountpoint: str, until_s: float) -> Ganesha:
    path = os.path.join(os.readlink(f"/proc/{pid}/cwd"), config_of(words))
    configuration = read_configuration(path, root=f"/proc/{pid}/root")
    is_here = os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt")
    try:
        open_files, unknown = _open_below(pid, mountpoint, until_s)
    except OSError:
        open_files, unknown = None, 0
    is_older = configuration.changed_s > _started_s(pid)
    command = shlex.join(words)
    return Ganesha(
        pid, service_of(pid), command, configuration, is_here, is_older, open_files, unknown
    )


def config_of(words: list[str]) -> str:
    """Return the configuration that the *words* of a command line name (-f FILE, -fFILE)."""
    for place, word in enumerate(words):
        if word.startswith("-f"):
            return word[2:] or "".join(words[place + 1 : place + 2])
    return CONFIG


def _open_below(pid: int, mountpoint: str, until_s: float) -> tuple[int, int]:
    """Return how many files below *mountpoint* *pid* has open, and how many could not be checked.

    Reads only links in /proc, never a path. The descriptor of the root directory does not count.
    """
    found = unknown = 0
    fds = os.listdir(f"/proc/{pid}/fd")
    for looked_at, fd in enumerate(fds):
        if time.monotonic() > until_s:
            return found, unknown + len(fds) - looked_at
        try:
            found += os.readlink(f"/proc/{pid}/fd/{fd}").startswith(f"{mountpoint}/")
        except OSError:
            unknown += 1
    return found, unknown


def _started_s(pid: int) -> float:
    """Return when process *pid* started, in seconds since the epoch (proc_pid_stat(5), btime)."""
    ticks = int(_text(f"/proc/{pid}/stat").rpartition(")")[2].split()[19])
    boot = next(line for line in _text("/proc/stat").splitlines() if line.startswith("btime "))
    return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def main() -> None:
    """Print each server as soon as it is found."""
    for one in _running(sys.argv[1]):
        said = one._asdict() | {"configuration": one.configuration._asdict()}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
