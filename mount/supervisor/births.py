"""How a server is started: it is forked from a template of the version that serves.

If that template has died, another one is started from the same files. If the files have changed, a
package was installed. Then the new version takes over only where nothing else can, and its template
is asked first whether it can, as in an upgrade.
"""

import contextlib
import os
from collections.abc import Mapping
from typing import Final

from mount.supervisor.last_lines import ServersLog, release_terminal
from mount.supervisor.server import Server
from mount.supervisor.templates import Program, Template

#: Time between attempts to replace a template that died or hangs; the first is made at once.
_NEXT_AFTER_S: Final = 60.0
_CHANGED: Final = "the files of the version that served have changed"


class NoServer(Exception):
    """No server was started. *status* is the wait status of its template, if that has died."""

    def __init__(self, why: str, status: int | None = None, *, is_final: bool = False) -> None:
        super().__init__(why)
        self.status = status
        self.is_final = is_final
        """Whether the next try would end the same way."""


class Births:
    """Starts the servers of one mount."""

    def __init__(self, program: Program, log: ServersLog, ready_fd: int) -> None:
        """*program* starts templates.

        The first server reports at *ready_fd* (-1: nowhere) how its start went.
        """
        self.program = program
        self.template: Template | None = None
        self.next_server = ""
        """Why the next server is not of this version, or "": what status shows of it."""
        self._log = log
        self._own_group = ready_fd < 0
        self._ready_fd = ready_fd
        #: Of the version that serves: the digest of its template's files, and its formats.
        self._tree, self._formats = "", dict[str, int]()
        #: The template that a server is being forked from, if one is.
        self._parent: Template | None = None
        #: When the next template may be started if ours has died.
        self._due_s = 0.0

    @property
    def is_awaited(self) -> bool:
        """Whether a server was asked for and is not there yet."""
        return self._parent is not None

    def begin(self, follower: Template | None) -> None:
        """Have a server forked by *follower*, an upgrade's template, or by ours. Raises OSError."""
        if follower is None and self.template is None:
            self.template = self.program.start(own_group=self._own_group)
        self._parent = follower or self.template

    def advance(self, now_s: float) -> Server | None:
        """Take the next step (import, ask, fork); return the server once it is there, else None.

        Raises NoServer.
        """
        parent = self._parent
        assert parent is not None, "it is awaited"
        why = parent.check(now_s)
        if (server := parent.born()) is not None:
            self._parent = None
            return server
        if why:
            self._parent = None
            if parent is self.template:
                self.lose_template()
            raise NoServer(f"the process of which servers are forked: {why}", parent.status)
        if parent.version and not parent.forks:
            self._step(parent)
        return None

    def _step(self, parent: Template) -> None:
        """Have *parent*, which has imported all, fork a server if its version may serve."""
        if not self._is_other(parent):
            self._fork(parent)
        elif parent.can:
            told = f"{_CHANGED}: version {parent.version} goes on, which is installed now"
            self._log.say("WARNING", told)
            self._fork(parent)
        elif not parent.is_asked:
            parent.ask(self._formats)
        elif parent.why_not:
            self._parent = None
            told = f"{_CHANGED}, and version {parent.version}, which is installed now, cannot go on"
            raise NoServer(f"{told}: {parent.why_not}", is_final=True)

    def _is_other(self, template: Template) -> bool:
        """Whether its servers would be of another version though no upgrade asked for that."""
        return template is self.template and self._tree not in ("", template.tree)

    def _fork(self, parent: Template) -> None:
        parent.fork(self._ready_fd)
        if self._ready_fd >= 0:  # so that its reader sees when the server closes it
            os.close(self._ready_fd)
            self._ready_fd = -1

    def serves(self, formats: Mapping[str, int]) -> None:
        """Note that a server of our template serves and uses *formats*; the next must match it."""
        self._formats, self.next_server = dict(formats), ""
        if self.template is not None:
            self._tree = self.template.tree

    def release_terminal(self) -> None:
        """Release the terminal that the mount was started from, if there was one."""
        if not self._own_group:
            release_terminal()
            if self.template is not None:
                self.template.tell(release=True)

    def follow(self, program: Program, template: Template) -> None:
        """From now on servers are those of *program*, forked by *template*."""
        self.lose_template()
        self.program, self.template = program, template

    def keep_template(self, now_s: float) -> bool:
        """Start another template if ours has died, as long as its files are unchanged.

        Returns whether ``next_server`` has changed.
        """
        template = self.template
        if template is None:
            if not self.next_server and now_s >= self._due_s:
                self._due_s = now_s + _NEXT_AFTER_S
                with contextlib.suppress(OSError):
                    self.template = self.program.start(own_group=self._own_group)
        elif why := template.check(now_s):
            self._log.say("WARNING", f"the process of which servers are forked: {why}: another one")
            self.lose_template()
        elif template.version and self._is_other(template):
            self.lose_template()
            self.next_server = (
                f"possible by the version that is installed now, if that can go on: {_CHANGED}; "
                "`kvfs upgrade` puts it in place"
            )
            self._log.say("ERROR", f"a take-over is {self.next_server}")
            return True
        return False

    def lose_template(self) -> None:
        """End our template, if we have one."""
        if self.template is not None:
            self.template.end()
        self.template = None
