"""Another version takes the place of the one that serves, if its servers say that they can follow.

Its template is asked while the server before serves on. What then fails leaves that as it was.
"""

import signal
from collections.abc import Mapping

from mount.supervisor.last_lines import ServersLog
from mount.supervisor.server import Server
from mount.supervisor.templates import Program, Template


class Candidate:
    """The template of another version, until its server may follow."""

    def __init__(self, program: Program, *, own_group: bool, to_any: bool) -> None:
        """Start it; *to_any* version, also that which serves. Raises OSError."""
        self.program = program
        self.to_any = to_any
        self.template = program.start(own_group=own_group)

    def look(self, now_s: float, formats: Mapping[str, int]) -> str:
        """Ask it when it can answer; return why it cannot follow one that uses *formats*, or ""."""
        template = self.template
        if why := template.look(now_s):
            return f"of the new version no server can be had: {why}"
        if template.version and not template.is_asked:
            template.ask(formats)
        return template.why_not


class Upgrades:
    """Those of one mount, one at a time."""

    def __init__(self, log: ServersLog, *, own_group: bool) -> None:
        self._log = log
        self._own_group = own_group
        self._candidate: Candidate | None = None
        self.follower: Candidate | None = None
        """The candidate that follows when the server has ended, or has just followed it."""

    def templates(self) -> list[Template]:
        """Return those that are not yet of the version that serves."""
        return [one.template for one in (self._candidate, self.follower) if one is not None]

    def begin(self, program: Program, server: Server | None, why_not: str, *, to_any: bool) -> None:
        """Let *program* follow *server* if it can; *why_not* says why none can, or ""."""
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

    def look(self, server: Server, now_s: float) -> None:
        """Do what is due while *server* serves: end it once another one can follow."""
        candidate = self._candidate
        if candidate is None:
            return
        why = candidate.look(now_s, server.formats)
        if not why and not candidate.template.can:
            return
        self._candidate = None
        version = candidate.template.version
        if why:
            candidate.template.end()
            self._refuse(server, why)
        elif not candidate.to_any and version == server.version:
            candidate.template.end()
            server.signal(signal.SIGHUP)  # it reads its settings again
        else:
            self.follower, server.replaced = candidate, True
            self._log.say("INFO", f"version {version} follows {server.version}")
            server.kill()  # what it holds goes over

    def server_has_died(self) -> None:
        """Give up a candidate that was not yet to follow: who asked for it hears of that death."""
        if self._candidate is not None:
            self._candidate.template.end()
            self._candidate = None
            self._refuse(None, "the server has just ended")

    def has_failed(self) -> None:
        """Let the version before serve again, if it was an upgrade that failed."""
        if self.follower is not None:
            self.follower.template.end()
            self.follower = None
            self._log.say("ERROR", "the upgrade has failed: the version before serves again")

    def _refuse(self, server: Server | None, why: str) -> None:
        """Let the server that serves serve on."""
        self._log.say("ERROR", f"no upgrade: {why}")
        if server is not None:
            server.tell(upgrade_failed=why)
