"""The templates that servers are forked from (mount/process/template.py), seen by the supervisor.

One template is of the version that serves. In an upgrade there is a second one, of the new version,
which is asked whether its servers can take over before the serving one ends.
"""

import ctypes
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvfs.machine.held_files import link_pair, send
from kvfs.machine.process_ends import stat_fields
from kvfs.storage.syscalls import LIBC, raise_errno
from mount.supervisor.server import Linked, Server, ended_how, status_of

#: For its imports, or a look at some tables, on a machine that may be loaded.
_PREPARED_MAX_S: Final = 60.0
#: For a fork, which takes milliseconds on a machine that is not loaded, while clients wait.
_FORK_MAX_S: Final = 3.0
_REAP_WAIT_S: Final = 1.0
#: PR_SET_CHILD_SUBREAPER of linux/prctl.h.
_SUBREAPER: Final = 36
#: numpy's OpenBLAS starts a thread for each core when it is loaded, and a process with threads
#: cannot be forked safely. Nothing here multiplies matrices.
_NO_BLAS_THREADS: Final = {"OPENBLAS_NUM_THREADS": "1"}


def become_parent_of_forked() -> None:
    """Make orphans among our descendants our children. Raises OSError.

    A template forks a process that forks the server and ends, so the server becomes our child.
    """
    if LIBC.prctl(_SUBREAPER, *(ctypes.c_ulong(value) for value in (1, 0, 0, 0))) != 0:
        raise_errno("PR_SET_CHILD_SUBREAPER")


class Program:
    """How the template of one installation is started."""

    def __init__(
        self, words: Sequence[str], arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """*words* and then *arguments* are its command line."""
        self._command = [*words, *arguments]
        self.arguments = arguments
        self._environment = {**_NO_BLAS_THREADS, **environment}

    def other(self, words: Sequence[str], python_path: str) -> "Program":
        """Return the program of another installation, with its modules in *python_path*."""
        environment = {**self._environment, "PYTHONPATH": python_path}
        if not python_path:
            del environment["PYTHONPATH"]
        return Program(words, self.arguments, environment)

    def start(self, *, own_group: bool) -> "Template":
        """Start a template. Raises OSError.

        *own_group*: in a process group of its own, so a terminal's Ctrl-C reaches us alone, and we
        hand it on.
        """
        link, theirs = link_pair()
        try:
            theirs.set_inheritable(True)
            command = [*self._command, "--template-fd", str(theirs.fileno())]
            group = 0 if own_group else os.getpgrp()
            pid = os.posix_spawn(command[0], command, self._environment, setpgroup=group)
        except BaseException:
            link.close()
            raise
        finally:
            theirs.close()
        return Template(pid, link)


class Template(Linked):
    """A process that imports all that servers need, and forks one each time it is told to."""

    def __init__(self, pid: int, link: socket.socket) -> None:
        """Take over *link*, whose other end the template *pid* has."""
        super().__init__(pid, link)
        self.version = ""
        """The version of its servers; "" until it has imported all."""
        self.tree = ""
        """A digest of the files it has imported: templates with the same one are alike."""
        self.can: bool | None = None
        """Whether its servers can take over from the one that serves; None until it answers."""
        self.why_not = ""
        self.status: int | None = None
        """Its wait status, once it has died."""
        self.is_asked = False
        #: When an answer must have come; None: none is awaited.
        self._until_s: float | None = time.monotonic() + _PREPARED_MAX_S
        #: Our end of the link to a server that it has been told to fork.
        self._awaited: socket.socket | None = None
        self._born: Server | None = None

    @property
    def forks(self) -> bool:
        """Whether it was told to fork a server that is not there yet."""
        return self._awaited is not None

    def ask(self, formats: Mapping[str, int]) -> None:
        """Ask whether its servers can take over from one that uses *formats*."""
        self.is_asked = True
        self._until_s = time.monotonic() + _PREPARED_MAX_S
        send(self.link, {"check": dict(formats)})

    def fork(self, ready_fd: int) -> None:
        """Have it fork a server, which reports at *ready_fd* (-1: nowhere) how its start went.

        One that reports is the first of a mount, so no client waits, and it may take longer.
        """
        self._awaited, theirs = link_pair()
        fds = [theirs.fileno(), *([ready_fd] if ready_fd >= 0 else [])]
        send(self.link, {"serve": True}, fds)  # if it has died, ``check`` finds out
        theirs.close()
        self._until_s = time.monotonic() + (_PREPARED_MAX_S if ready_fd >= 0 else _FORK_MAX_S)

    def born(self) -> Server | None:
        """Return the server that was forked, the first time it is asked for; else None."""
        server, self._born = self._born, None
        return server

    def check(self, now_s: float) -> str:
        """Take its messages; return why it has failed, or ""."""
        failed = ""
        for said, fds in self.messages():
            failed = failed or self._learn(said)
            for fd in fds:
                os.close(fd)
        if failed or self._born is not None:
            return failed
        if self.has_died():
            self.status = status_of(self, _REAP_WAIT_S)
            return f"it {ended_how(self.status)}"
        if stat_fields(self.pid)[:1] == [b"T"]:
            return "it was stopped"
        late = self._until_s is not None and now_s >= self._until_s
        return "it says nothing" if late else ""

    def _learn(self, said: Mapping[str, Any]) -> str:
        self._until_s = None
        if "waits" in said:
            self.version, self.tree = str(said["waits"]), str(said["tree"])
        elif "can" in said:
            self.can = True
        elif "cannot" in said:
            self.can, self.why_not = False, str(said["cannot"])
        elif "forked" in said and self._awaited is not None:
            link, self._awaited = self._awaited, None
            if said["forked"] < 0:
                link.close()
                return "it cannot fork"
            self._born = Server(int(said["forked"]), link)
        return ""

    def close(self) -> None:
        """Close our ends; a server that it was told to fork ends when its link does."""
        if self._awaited is not None:
            self._awaited.close()
        super().close()
