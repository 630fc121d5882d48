"""The process that a mount's servers are forked from: it imports once all that a server may need.

So a server starts in a few milliseconds, and with the same modules as the one before, whatever was
installed meanwhile. The template itself serves nothing: it has no event loop, no thread and no file
of the pool, so what a server inherits is what a new interpreter would have after the same imports.
"""

import contextlib
import gc
import hashlib
import os
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from kvfs import __version__
from kvfs.machine.held_files import LINE_MAX, SupervisorGone, receive, send
from mount.supervisor.last_lines import release_terminal

_PID_BYTES: Final = 32
_NAME: Final = "kvfs-template"


class Forked(NamedTuple):
    """The descriptors that a forked server was given; it must close both."""

    link_fd: int
    ready_fd: int | None
    """Where it says how its start went, if anybody waits for that."""


def fork_servers(
    fd: int, import_all: Callable[[], None], why_not: Callable[[Mapping[str, int]], str]
) -> Forked:
    """Run as a template, on orders that the supervisor sends to *fd*; return in each forked server.

    *why_not* is given the formats of the serving server, and returns why a server of this version
    cannot take over from it, or "". In the template, raises SupervisorGone when that has gone.
    """
    end = socket.socket(fileno=fd)
    end.set_inheritable(False)
    name = _take_name(_NAME)
    with contextlib.suppress(Exception):  # *why_not* and servers will fail likewise, and report it
        import_all()
    gc.collect()
    gc.freeze()  # a collection in a server does not write to the pages that it shares with us
    send(end, {"waits": __version__, "tree": _tree()})
    while (message := receive(end)) is not None:
        said, fds = message
        if "check" in said:
            why = why_not(said["check"])
            send(end, {"cannot": why[:LINE_MAX]} if why else {"can": __version__})
        elif "serve" in said:
            pid = _fork_away()
            if pid == 0:
                end.close()
                _take_name(name)
                return Forked(fds[0], fds[1] if len(fds) > 1 else None)
            send(end, {"forked": pid})
        elif "release" in said:
            release_terminal()
        for given in fds:
            os.close(given)
    raise SupervisorGone


def _fork_away() -> int:
    """Fork a process that is not our child; return its pid, -1 on failure, and 0 in that process.

    A process in between forks it and ends before this returns, so the kernel makes it a child of
    the supervisor (PR_SET_CHILD_SUBREAPER of prctl(2)).
    """
    reading, writing = os.pipe()
    try:
        between = os.fork()
    except OSError:  # no memory, or no pid left: the supervisor tries again
        os.close(reading)
        os.close(writing)
        return -1
    if between == 0:
        try:
            pid = os.fork()
        except OSError:
            os._exit(1)
        if pid:
            os.write(writing, str(pid).encode())
            os._exit(0)
        os.close(reading)
        os.close(writing)
        return 0
    os.waitpid(between, 0)
    os.close(writing)
    try:
        # One read, because the server may still have the write end. The pid is there already.
        return int(os.read(reading, _PID_BYTES) or -1)
    finally:
        os.close(reading)


def _take_name(name: str) -> str:
    """Let ps and top show *name* for this thread; return what they showed (proc_pid_comm(5))."""
    with open("/proc/self/comm", "r+") as file:
        before = file.read().rstrip("\n")
        file.seek(0)
        file.write(name)
    return before


def _tree() -> str:
    """Return a digest of the files that were imported: their paths, sizes and times.

    Inode numbers do not count: the same package, installed again, counts as the same files.
    """
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    digest = hashlib.blake2b(sys.executable.encode(), digest_size=16)
    for path in sorted(path for path in files if path):
        try:
            found = os.stat(path)
        except OSError:
            digest.update(f"{path}\0gone\n".encode(errors="surrogateescape"))
            continue
        digest.update(
            f"{path}\0{found.st_size} {found.st_mtime_ns}\n".encode(errors="surrogateescape")
        )
    return digest.hexdigest()
