"""The supervisor of one mount: it starts the server, holds its open files, and starts it again.

It never touches the mount, so nothing that happens there can hold it up. What it holds is what the
servers gave it (kvfs/machine/held_files.py).
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Mapping
from typing import Any, Final

from kvfs.machine.held_files import Message
from mount.supervisor.holdings import Holdings
from mount.supervisor.last_lines import ServersLog, release_terminal
from mount.supervisor.newcomers import Candidate, Program, Spare
from mount.supervisor.restarts import Restarts
from mount.supervisor.server import Server, ended_how, reap_others, status_of
from mount.supervisor.systemd import Systemd

#: A server that starts, and says nothing for so long, hangs. Of an upgrade: callers wait for it.
_SILENT_MAX_S: Final = 15.0
_UPGRADE_SILENT_MAX_S: Final = 5.0
#: From SIGABRT, at which a server that hangs says where, to SIGKILL.
_ABORTING_MAX_S: Final = 10.0
#: How long a dead server's last thread is waited for, once all calls have ended.
_REAP_WAIT_S: Final = 10.0
#: How often is looked for the end of a server's main thread, which no event tells of. Mostly all
#: threads end at once, of which one does.
_LOOK_S: Final = 0.25
#: kvfs.core.errors.ServeFailed, whose module is large.
_SERVE_FAILED: Final = 12
_NEVER_S: Final = float("inf")
_DEAD: Final = "the mount is dead, and calls on it have ended with an error"
_STOPS: Final = (signal.SIGTERM, signal.SIGINT)
#: What a server gets that comes to us.
HANDED_ON: Final = (*_STOPS, signal.SIGHUP)
#: Another installed version follows; if there is none, the settings are read again.
_UPGRADES: Final = signal.SIGUSR2


class Supervisor:
    """One mount's."""

    def __init__(
        self, program: Program, installed: Program, systemd: Systemd, ready_fd: int
    ) -> None:
        """*program* starts a server, which says at *ready_fd* (-1: nowhere) how that went.

        *installed* is what SIGUSR2 asks for.
        """
        self._program = program
        self._installed = installed
        self._systemd = systemd
        self._own_group = ready_fd < 0
        self._ready_fd = ready_fd
        self._log = ServersLog()
        self._holdings = Holdings(systemd)
        #: Whether there is a mount that somebody may use.
        self._served = self._holdings.can_go_on
        self._server: Server | None = None
        self._spare = Spare()
        self._candidate: Candidate | None = None
        #: The candidate that follows when the server has ended, or has just followed it.
        self._follower: Candidate | None = None
        self._restarts = Restarts()
        self._died_s = time.monotonic() if self._served else 0.0
        #: When the next server is started.
        self._start_s = time.monotonic()
        self._stopping = 0
        self._kill_s = _NEVER_S
        self._said_alive_s = 0.0
        self._exit_status: int | None = None
        #: What the last server died of.
        self._why = ""
        self._wakeup, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for number in (*HANDED_ON, _UPGRADES, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)

    def run(self) -> int:
        """Supervise until the last server has ended; return its wait status."""
        while self._exit_status is None:
            now_s = time.monotonic()
            if self._server is None and now_s >= self._start_s:
                self._start(now_s)
            self._wait()
            self._look_at_newcomers(time.monotonic())
        if self._candidate is not None:
            self._candidate.server.end()
        self._spare.drop()
        return self._exit_status

    def _start(self, now_s: float) -> None:
        """Let a server begin: that of the upgrade, the spare, or a new one."""
        self._restarts.started(now_s)
        counts = self._holdings.counts
        first = {
            **counts,
            "upgrades": counts["upgrades"] + (self._follower is not None),
            "died_s": self._died_s,
            "supervisor_pid": os.getpid(),
            "alive_every_s": self._systemd.alive_every_s,
        }
        try:
            self._server = (
                self._follower.server
                if self._follower is not None
                else self._spare.take()
                or self._program.start(ready_fd=self._ready_fd, own_group=self._own_group)
            )
            self._server.begin(first, self._holdings.files)
        except OSError as error:
            self._log.say("ERROR", f"the server cannot be started: {error.strerror}")
            self._try_again(_SERVE_FAILED << 8)
        if self._ready_fd >= 0:  # its end is to be seen
            os.close(self._ready_fd)
            self._ready_fd = -1

    def _wait(self) -> None:
        """Wait for what comes first: a signal, a message, a death, or a time."""
        poll, server = select.poll(), self._server
        poll.register(self._wakeup, select.POLLIN)
        candidate = None if self._candidate is None else self._candidate.server
        for one in (server, candidate):
            if one is not None:
                poll.register(one.pidfd, select.POLLIN)
                if not one.hung_up:
                    poll.register(one.link, select.POLLIN)
        now_s = time.monotonic()
        poll.poll(max(0.0, self._next_s(now_s) - now_s) * 1000 + 1)
        self._take_signals()
        if server is None:
            return
        for message in server.messages():
            self._take(server, message)
        if server.has_died():
            self._take_death(server)
        else:
            self._watch(server, time.monotonic())

    def _next_s(self, now_s: float) -> float:
        """Return when there is something to do, if nothing happens before."""
        times = [self._kill_s, now_s + _LOOK_S]
        if self._systemd.watchdog_s:
            times.append(self._said_alive_s + self._systemd.alive_every_s)
        if self._server is None:
            times.append(self._start_s)
        return min(times)

    def _silent_max_s(self, server: Server) -> float | None:
        """Return how long *server* may say nothing; None: for ever."""
        if server.is_ready:
            return self._systemd.watchdog_s or None
        if self._follower is not None:
            return _UPGRADE_SILENT_MAX_S
        return _SILENT_MAX_S if self._served else None

    def _watch(self, server: Server, now_s: float) -> None:
        """Do what is due while *server* lives."""
        if now_s >= self._said_alive_s + self._systemd.alive_every_s:
            self._said_alive_s = now_s
            self._systemd.notify("WATCHDOG=1")
        if now_s >= self._kill_s:
            self._kill_s = _NEVER_S
            server.kill()
        silent_s = self._silent_max_s(server)
        if server.ended or silent_s is None or now_s < server.heard_s + silent_s:
            return
        server.heard_s = now_s
        self._log.say("ERROR", f"server {server.pid} says nothing for {silent_s:g} s: killing it")
        server.signal(signal.SIGABRT)
        self._kill_s = now_s + min(_ABORTING_MAX_S, silent_s / 6)

    def _take_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._wakeup, 4096):
                if number in HANDED_ON:
                    self._hand_on(number)
                elif number == _UPGRADES:
                    self._begin_upgrade(self._installed, to_any=False)

    def _hand_on(self, number: int) -> None:
        server = self._server
        if number in _STOPS:
            self._stopping = number
        if server is not None and (server.is_ready or not self._served):
            server.signal(number)
        # Else a server comes, and is told then.

    def _take(self, server: Server, message: Message) -> None:
        said, fds = message
        now_s = time.monotonic()
        if "hold" in said and len(fds) == 1:
            self._holdings.hold(str(said["hold"]), fds.pop())
        elif "drop" in said:
            self._holdings.drop(str(said["drop"]))
            server.tell(dropped=True)
        elif "log" in said:
            self._log.is_at(str(said["log"]), str(said["name"]), str(said["dead_path"]))
        elif "alive" in said:
            self._restarts.alive(now_s)
            self._tell_progress(said["alive"])
        elif "ready" in said:
            server.version, server.formats = str(said["version"]), said["formats"]
            self._take_ready(server, str(said["ready"]), now_s)
        elif "upgrade" in said:
            program = self._program.other(said["upgrade"], str(said["python_path"]))
            self._begin_upgrade(program, to_any=True)
        elif "ended" in said:
            server.ended = True
            self._spare.drop()
            self._systemd.notify("STOPPING=1")
            self._holdings.drop_all()
            server.tell(dropped=True)
        elif "fatal" in said:
            server.fatal = str(said["fatal"])
        for fd in fds:
            os.close(fd)

    def _tell_progress(self, progress: Mapping[str, Any]) -> None:
        """Let systemd wait on while a server comes on in a long start."""
        if "of" in progress:
            self._systemd.notify(
                f"STATUS=rebuilding the index: {progress['done']} of {progress['of']} files",
                f"EXTEND_TIMEOUT_USEC={progress['wait_s'] * 1_000_000}",
            )

    def _take_ready(self, server: Server, note: str, now_s: float) -> None:
        server.is_ready = True
        self._restarts.ready(now_s)
        if not self._own_group and not self._served:
            release_terminal()
        counts = self._holdings.counts
        if self._follower is not None:
            self._program, self._follower = self._follower.program, None
            self._spare.drop()  # of the version before
            counts["upgrades"] += 1
        if took_over := self._served and self._died_s > 0:
            pause_s = now_s - self._died_s
            counts["longest_pause_s"] = max(counts["longest_pause_s"], pause_s)
            self._log.say("INFO", f"server {server.pid} serves after a pause of {pause_s:.3f} s")
        self._holdings.note_counts()
        self._served = True
        self._log.serves()
        if self._holdings.can_go_on:
            self._spare.wanted(now_s, took_over=took_over)
        self._systemd.notify("READY=1", f"STATUS={note}")
        # The killer of processes that need memory spares us as it spares the server.
        with (
            contextlib.suppress(OSError),
            open(f"/proc/{server.pid}/oom_score_adj", "rb") as theirs,
            open("/proc/self/oom_score_adj", "wb") as ours,
        ):
            ours.write(theirs.read())
        if self._stopping:
            server.signal(self._stopping)

    def _look_at_newcomers(self, now_s: float) -> None:
        """Do what is due for those that do not serve."""
        if self._server is not None and self._server.is_ready:
            self._spare.look(self._program, now_s, own_group=self._own_group)
        reap_others(self._server)
        candidate = self._candidate
        if candidate is None:
            return
        if why := candidate.look(now_s):
            self._refuse(candidate, why)
        elif candidate.version is not None:
            self._candidate = None
            self._let_follow(candidate)

    def _begin_upgrade(self, program: Program, *, to_any: bool) -> None:
        server, why = self._server, ""
        if server is None or not server.is_ready or self._stopping:
            self._refuse(None, "no server serves now")
            return
        if not self._holdings.can_go_on:
            why = "on this kernel no server can follow another: mount again"
        elif self._candidate is not None:
            why = "an upgrade has begun already"
        try:
            if not why:
                self._candidate = Candidate(
                    program, server.formats, own_group=self._own_group, to_any=to_any
                )
        except OSError as error:
            why = f"the new server cannot be started: {error.strerror}"
        if why:
            self._refuse(None, why)

    def _refuse(self, candidate: Candidate | None, why: str) -> None:
        """Let the server that serves serve on."""
        if candidate is not None:
            candidate.server.end()
            self._candidate = None
        self._log.say("ERROR", f"no upgrade: {why}")
        if self._server is not None:
            self._server.tell(upgrade_failed=why)

    def _let_follow(self, candidate: Candidate) -> None:
        """End the server that serves: what it holds goes over to *candidate*."""
        server = self._server
        if server is None or not server.is_ready or self._stopping:
            self._refuse(candidate, "the server has just ended")
            return
        if not candidate.to_any and candidate.version == server.version:
            candidate.server.end()
            server.signal(signal.SIGHUP)
            return
        self._follower = candidate
        self._log.say("INFO", f"version {candidate.version} follows {server.version}")
        server.kill()

    def _take_death(self, server: Server) -> None:
        for message in server.messages():  # what it said last
            self._take(server, message)
        status = status_of(server)
        self._server, self._kill_s = None, _NEVER_S
        if server.ended or self._stopping or not (self._served and self._holdings.can_go_on):
            self._holdings.end_calls()
            if status is None:
                status = status_of(server, _REAP_WAIT_S)
            if self._served and not server.ended:
                self._log.say("ERROR", f"server {server.pid} {ended_how(status)}: {_DEAD}")
            self._exit_status = _SERVE_FAILED << 8 if status is None else status
        elif self._follower is not None and server is not self._follower.server:
            self._died_s = self._start_s = time.monotonic()  # by us
            self._restarts.replaced(self._died_s)
        else:
            self._go_on(server, status)
        server.close()

    def _go_on(self, server: Server, status: int | None) -> None:
        """Start another server in place of one that died by itself."""
        if self._follower is not None:
            self._follower = None
            self._log.say("ERROR", "the upgrade has failed: the version before serves again")
        if server.is_ready or not self._died_s:
            self._died_s = time.monotonic()
        self._why = server.fatal or f"it {ended_how(status)}"
        self._log.say("ERROR", f"server {server.pid}: {self._why}: starting it again")
        self._holdings.counts["restarts"] += 1
        self._systemd.notify("STATUS=the server has died and is started again")
        self._try_again(status)

    def _try_again(self, status: int | None) -> None:
        """Start a server soon; or give up, as what the last one's wait *status* says."""
        now_s = time.monotonic()
        pause_s = self._restarts.died(now_s) if self._served else None
        if pause_s is not None:
            self._start_s = now_s + pause_s
            return
        self._holdings.end_calls()
        if self._served:
            self._log.say("ERROR", f"no server can be had: {_DEAD}")
            self._log.leave(self._why)
        self._exit_status = _SERVE_FAILED << 8 if status is None else status
