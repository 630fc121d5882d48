"""The process of which a mount's servers are forked: it imports once all that a server may need.

So a server begins in a few milliseconds, and with the modules that the one before had, whatever was
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
    """What a server was given with its life; both are its own to close."""

    link_fd: int
    ready_fd: int | None
    """Where it says how its start went, if anybody waits for that."""


def fork_servers(
    fd: int, import_all: Callable[[], None], why_not: Callable[[Mapping[str, int]], str]
) -> Forked:
    """Be a template, told by the supervisor at the descriptor *fd*; return in each server.

    *why_not* is told the formats of a server that serves, and returns why those of this version
    cannot follow it, or "". Raises SupervisorGone in the template, at its end.
    """
    end = socket.socket(fileno=fd)
    end.set_inheritable(False)
    name = _take_name(_NAME)
    with contextlib.suppress(Exception):  # *why_not* fails alike, and a server, who can report it
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
    """Fork a process that is not our child; return its number, -1 if that failed, and 0 in it.

    It is a child of the supervisor, to which the kernel gives the children of who has ended
    (PR_SET_CHILD_SUBREAPER of prctl(2)): the one between us and it has when we return.
    """
    reading, writing = os.pipe()
    try:
        between = os.fork()
    except OSError:  # no memory, or no number: the supervisor tries again
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
        # The server has the other end, too: who was between us has written before it ended.
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

    Not of their inode numbers: a package that is installed again has the same files.
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
