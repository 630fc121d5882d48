"""How a server is started: it is forked from a template of the version that serves.

If that template has died, another one is started from the same files. If the files have changed, a
package was installed. Then the new version takes over only where nothing else can, and its template
is asked first whether it can, as in an upgrade.

In an upgrade another version takes over from the one that serves, if it says that it can. Its
template is asked while the old server serves on, so a failure up to then changes nothing.
"""

import contextlib
import os
import signal
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


class Candidate:
    """The template of another version, before its server serves."""

    def __init__(self, program: Program, *, own_group: bool, to_any: bool) -> None:
        """Start it; *to_any*: also if it is of the version that serves. Raises OSError."""
        self.program = program
        self.to_any = to_any
        self.template = program.start(own_group=own_group)

    def check(self, now_s: float, formats: Mapping[str, int]) -> str:
        """Ask it once it can answer; return why it cannot take over with *formats*, or ""."""
        template = self.template
        if why := template.check(now_s):
            return f"of the new version no server can be had: {why}"
        if template.version and not template.is_asked:
            template.ask(formats)
        return template.why_not


class Upgrades:
    """The upgrades of one mount, one at a time."""

    def __init__(self, log: ServersLog, *, own_group: bool) -> None:
        self._log = log
        self._own_group = own_group
        self._candidate: Candidate | None = None
        self.follower: Candidate | None = None
        """The candidate whose server is next, until that one is ready."""

    def templates(self) -> list[Template]:
        """Return the templates of versions that do not serve yet."""
        return [one.template for one in (self._candidate, self.follower) if one is not None]

    def begin(self, program: Program, server: Server | None, why_not: str, *, to_any: bool) -> None:
        """Have *program* replace *server* if it can; *why_not*: why nothing can, or ""."""
        why = why_not
        if not why and self._candidate is not None:
            why = "an upgrade has begun already"
        if not why:
            try:
                self._candidate = Candidate(program, own_group=self._own_group, to_any=to_any)
            except OSError as error:
                why = f"the new server cannot be started: {error.strerror}"
        if why:
            self._refuse(server, why)

    def run_due(self, server: Server, now_s: float) -> bool:
        """Do what is due while *server* serves; True: it must end now, as another one follows."""
        candidate = self._candidate
        if candidate is None:
            return False
        why = candidate.check(now_s, server.formats)
        if not why and not candidate.template.can:
            return False
        self._candidate = None
        version = candidate.template.version
        if why:
            candidate.template.end()
            self._refuse(server, why)
        elif not candidate.to_any and version == server.version:
            candidate.template.end()
            server.signal(signal.SIGHUP)  # it reads its settings again
        else:
            self.follower = candidate
            self._log.say("INFO", f"version {version} follows {server.version}")
            return True
        return False

    def server_has_died(self) -> None:
        """Give up a candidate that was not next yet; whoever asked for it notices the death."""
        if self._candidate is not None:
            self._candidate.template.end()
            self._candidate = None
            self._refuse(None, "the server has just ended")

    def has_failed(self) -> None:
        """If it was an upgrade that failed, have the old version serve again."""
        if self.follower is not None:
            self.follower.template.end()
            self.follower = None
            self._log.say("ERROR", "the upgrade has failed: the version before serves again")

    def _refuse(self, server: Server | None, why: str) -> None:
        """Log and tell *server*, which serves on, why there is no upgrade."""
        self._log.say("ERROR", f"no upgrade: {why}")
        if server is not None:
            server.tell(upgrade_failed=why)
