"""Servers that do not serve yet: a spare one, and the one of an upgrade.

The spare has imported all that it needs and waits, so that at a death nobody waits for that. The
candidate of an upgrade is asked whether it can follow the server that serves, before that one ends.
"""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Final

from mount.supervisor.server import Server

#: After the first start: a mount that is short needs none, and a host that boots has other work.
_FIRST_SPARE_AFTER_S: Final = 30.0
#: After a server took over, and before the next one if a spare has died.
_SPARE_AFTER_S: Final = 5.0
_NEXT_SPARE_AFTER_S: Final = 60.0
#: A candidate imports and looks at some tables; the machine may be loaded.
_CANDIDATE_MAX_S: Final = 60.0
#: A spare imports; one that has not done so by then hangs.
_SPARE_MAX_S: Final = 60.0
#: numpy's OpenBLAS starts a thread for each core when it is loaded, a sixth of the time that all
#: imports take. Nothing here multiplies matrices.
_NO_BLAS_THREADS: Final = {"OPENBLAS_NUM_THREADS": "1"}


class Program:
    """How servers of one installation are started."""

    def __init__(
        self, words: Sequence[str], arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """*words* and then *arguments* are its command line."""
        self._command = [*words, *arguments]
        self._arguments = arguments
        self._environment = {**_NO_BLAS_THREADS, **environment}

    def other(self, words: Sequence[str], python_path: str) -> "Program":
        """Return that of another installation, whose modules are found in *python_path*."""
        environment = {**self._environment, "PYTHONPATH": python_path}
        if not python_path:
            del environment["PYTHONPATH"]
        return Program(words, self._arguments, environment)

    def start(self, *, ready_fd: int = -1, own_group: bool) -> Server:
        """Start a server. Raises OSError."""
        return Server(self._command, self._environment, ready_fd=ready_fd, own_group=own_group)


class Spare:
    """At most one server that waits."""

    def __init__(self) -> None:
        self.server: Server | None = None
        self._due_s = self._until_s = float("inf")
        self._waits = False
        """Whether it has imported all, and says so."""

    def wanted(self, now_s: float, *, took_over: bool) -> None:
        """A server serves now, and perhaps *took_over*: one that waits is soon of use."""
        if self.server is None:
            self._due_s = now_s + (_SPARE_AFTER_S if took_over else _FIRST_SPARE_AFTER_S)

    def look(self, program: Program, now_s: float, *, own_group: bool) -> None:
        """Start it when it is due, and again later if it has died or hangs."""
        if self.server is not None:
            self._listen(self.server)
            if self.server.has_died() or (not self._waits and now_s >= self._until_s):
                self.drop()
                self._due_s = now_s + _NEXT_SPARE_AFTER_S
        if now_s >= self._due_s:
            self._due_s, self._until_s = float("inf"), now_s + _SPARE_MAX_S
            try:
                self.server = program.start(own_group=own_group)
            except OSError:
                self._due_s = now_s + _NEXT_SPARE_AFTER_S

    def _listen(self, server: Server) -> None:
        for said, fds in server.messages():
            self._waits |= "waits" in said
            for fd in fds:
                os.close(fd)

    def take(self) -> Server | None:
        """Return it, to serve; None if there is none that waits: one that hangs serves nobody."""
        server = self.server
        if server is not None:
            self._listen(server)
        if server is None or not self._waits or server.has_died():
            self.drop()
            return None
        self.server, self._due_s, self._waits = None, float("inf"), False
        return server

    def drop(self) -> None:
        """End it."""
        if self.server is not None:
            self.server.end()
        self.server, self._due_s, self._waits = None, float("inf"), False


class Candidate:
    """The server of an upgrade, until it may follow."""

    def __init__(
        self, program: Program, formats: Mapping[str, int], *, own_group: bool, to_any: bool
    ) -> None:
        """Start it and ask; *to_any* version, also that which serves. Raises OSError."""
        self.program = program
        self.to_any = to_any
        self.version: str | None = None
        """Its version, once it can follow."""
        self._until_s = time.monotonic() + _CANDIDATE_MAX_S
        self.server = program.start(own_group=own_group)
        self.server.check(formats)

    def look(self, now_s: float) -> str:
        """Take what it says; return why it cannot follow, or ""."""
        for said, fds in self.server.messages():
            for fd in fds:
                os.close(fd)
            if "can" in said:
                self.version = str(said["can"])
            elif "cannot" in said:
                return str(said["cannot"])
        if self.server.has_died():
            return "the new server ended before it could follow"
        if self.version is None and now_s >= self._until_s:
            return f"the new server says nothing for {_CANDIDATE_MAX_S:g} s"
        return ""
