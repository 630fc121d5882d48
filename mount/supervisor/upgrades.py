"""Upgrades: another version takes over from the one that serves, if it says that it can.

Its template is asked while the old server serves on, so a failure up to then changes nothing.
"""

import signal
from collections.abc import Mapping

from mount.supervisor.last_lines import ServersLog
from mount.supervisor.server import Server
from mount.supervisor.templates import Program, Template


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
