"""The supervisor of one mount: it has servers forked, one after the other, and holds their files.

It never touches the mount, so nothing that happens there can hold it up. The files it holds are
those that the servers gave it (kvfs/machine/held_files.py). What it does when something happens is
decided by the table of mount/supervisor/states.py.
"""

import contextlib
import os
import select
import signal
import time
from typing import Final

from kvfs.machine.held_files import Message
from mount.supervisor.births import Births, NoServer, Upgrades
from mount.supervisor.last_lines import ServersLog, back_again
from mount.supervisor.server import (
    Linked,
    Server,
    be_spared_as,
    ended_how,
    reap_others,
    status_of,
    was_sigkill,
)
from mount.supervisor.states import Act, Course, MountEvent, Restarts
from mount.supervisor.systemd import Holdings, Systemd
from mount.supervisor.templates import Program, Template

#: A starting server that is silent for this long hangs. Less in an upgrade, while callers wait.
_SILENT_MAX_S: Final = 15.0
_UPGRADE_SILENT_MAX_S: Final = 5.0
#: A server that dies sooner after it was ready has hardly served: the pause counts as one.
_ANSWERS_S: Final = 0.25
#: How long to wait for a dead server's last thread, once all calls have ended.
_REAP_WAIT_S: Final = 10.0
#: How often to check if a server's main thread has ended, for which there is no event. Mostly all
#: threads end together; for that there is one.
_LOOK_S: Final = 0.25
#: The exit code of kvfs.core.errors.ServeFailed, a module too large to import here.
_SERVE_FAILED: Final = 12
_NEVER_S: Final = float("inf")
_DEAD: Final = "the mount is dead, and calls on it have ended with an error"
_STOPS: Final = (signal.SIGTERM, signal.SIGINT)
#: Signals that we hand on to the server.
HANDED_ON: Final = (*_STOPS, signal.SIGHUP)
#: Upgrades to the installed version; if that one serves, it reads its settings again.
_UPGRADES: Final = signal.SIGUSR2


class Supervisor:
    """The supervisor of one mount."""

    def __init__(
        self, program: Program, installed: Program, systemd: Systemd, ready_fd: int
    ) -> None:
        """*program* starts templates; *installed* is the program that SIGUSR2 upgrades to.

        The first server reports at *ready_fd* (-1: nowhere) how its start went.
        """
        self._installed = installed
        self._systemd = systemd
        self._log = ServersLog()
        self._births = Births(program, self._log, ready_fd)
        self._upgrades = Upgrades(self._log, own_group=ready_fd < 0)
        self._holdings = Holdings(systemd)
        self._course = Course(has_mount=self._holdings.can_go_on)
        self._server: Server | None = None
        self._restarts = Restarts()
        #: When the next server is started.
        self._start_s = time.monotonic()
        #: Since when callers wait for a server, or did so last; 0: never.
        self._died_s = self._start_s if self._holdings.can_go_on else 0.0
        #: The signal that told us to stop, if one did.
        self._stop_signal = 0
        self._kill_s = _NEVER_S
        self._exit_status = 0
        #: What the last server died of.
        self._why = ""
        self._wakeup, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for number in (*HANDED_ON, _UPGRADES, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)

    def run(self) -> int:
        """Supervise until the last server has ended; return its wait status."""
        while not self._course.is_over:
            if self._wants_server and time.monotonic() >= self._start_s:
                self._start()
            self._wait()
            self._look_at_templates(time.monotonic())
        for template in self._templates():
            template.end()
        return self._exit_status

    @property
    def _wants_server(self) -> bool:
        return self._course.wants_server and not self._births.is_awaited

    def _templates(self) -> list[Template]:
        ours = self._births.template
        return [*self._upgrades.templates(), *([] if ours is None else [ours])]

    def _linked(self) -> list[Linked]:
        """Return our children."""
        templates = self._templates()
        return [*templates] if self._server is None else [self._server, *templates]

    def _start(self) -> None:
        """Have a server forked: of the upgrade's version, or else of the one that served."""
        self._restarts.started()
        follower = self._upgrades.follower
        try:
            self._births.begin(None if follower is None else follower.template)
        except OSError as error:
            self._why = f"the server cannot be started: {error.strerror}"
            self._log.say("ERROR", self._why)
            self._go_without(MountEvent.NO_SERVER, _SERVE_FAILED << 8)
        else:
            self._await_birth(time.monotonic())  # a template that is ready is told at once

    def _await_birth(self, now_s: float) -> None:
        """Have the awaited server begin, once it is there."""
        try:
            server = self._births.advance(now_s)
        except NoServer as none:
            self._upgrades.has_failed()
            self._why = str(none)
            self._log.say("ERROR", self._why)
            status = _SERVE_FAILED << 8 if none.status is None else none.status
            self._go_without(MountEvent.NO_HOPE if none.is_final else MountEvent.NO_SERVER, status)
            return
        if server is not None:
            self._course.act_for(MountEvent.BORN)
            self._server = server
            counts = self._holdings.counts
            first = {
                **counts,
                "upgrades": counts["upgrades"] + (self._upgrades.follower is not None),
                "died_s": self._died_s,
                "supervisor_pid": os.getpid(),
                "alive_every_s": self._systemd.alive_every_s,
                "next_server": "",
            }
            server.begin(first, self._holdings.files)

    def _wait(self) -> None:
        """Wait for what comes first: a signal, a message, a death, or a time."""
        poll, server = select.poll(), self._server
        poll.register(self._wakeup, select.POLLIN)
        for process in self._linked():
            poll.register(process.pidfd, select.POLLIN)
            if not process.hung_up:
                poll.register(process.link, select.POLLIN)
        now_s = time.monotonic()
        poll.poll(max(0.0, self._next_s(now_s) - now_s) * 1000 + 1)
        self._take_signals()
        self._systemd.say_alive(time.monotonic())
        if server is None:
            return
        for message in server.messages():
            self._act_on(server, message)
        if server.has_died():
            self._take_death(server)
        else:
            self._watch(server, time.monotonic())

    def _next_s(self, now_s: float) -> float:
        """Return the time (monotonic) of the next thing to do, if nothing happens before."""
        times = [self._kill_s, now_s + _LOOK_S, self._systemd.alive_due_s]
        if self._wants_server:
            times.append(self._start_s)
        return min(times)

    def _silent_max_s(self, server: Server) -> float | None:
        """Return for how many seconds *server* may be silent; None: for ever."""
        if self._course.is_served:
            return self._systemd.watchdog_s or server.silent_max_s or None
        if self._course.is_awaited:
            is_upgrade = self._upgrades.follower is not None
            return _UPGRADE_SILENT_MAX_S if is_upgrade else _SILENT_MAX_S
        return None

    def _watch(self, server: Server, now_s: float) -> None:
        """Do what is due while *server* lives."""
        if now_s >= self._kill_s:
            self._kill_s = _NEVER_S
            server.kill()
        silent_s = self._silent_max_s(server)
        if silent_s is None or server.silent_s < silent_s:
            return
        if (wait := server.device_wait()) is not None:
            if wait:
                self._log.say("ERROR", wait)
            return
        if self._course.act_for(MountEvent.SILENT) is Act.KILL:
            self._kill_hung(server, silent_s, now_s)

    def _kill_hung(self, server: Server, silent_s: float, now_s: float) -> None:
        self._log.say("ERROR", f"server {server.pid} says nothing for {silent_s:g} s: killing it")
        self._kill_s = server.abort(silent_s, now_s)

    def _take_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._wakeup, 4096):
                if number in HANDED_ON:
                    self._take_signal(number)
                elif number == _UPGRADES:
                    self._begin_upgrade(self._installed, to_any=False)

    def _take_signal(self, number: int) -> None:
        if number in _STOPS:
            self._stop_signal = number
        act = self._course.act_for(MountEvent.STOP if number in _STOPS else MountEvent.RELOAD)
        if act is Act.QUIT:
            self._exit_status = number
        elif act is Act.HAND_ON and self._server is not None:
            self._server.signal(number)

    def _act_on(self, server: Server, message: Message) -> None:
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
            self._systemd.say_progress(said["alive"])
        elif "ready" in said:
            server.version, server.formats = str(said["version"]), said["formats"]
            server.silent_max_s = float(said["silent_max_s"])
            is_first = not self._course.is_awaited
            act = self._course.act_for(MountEvent.READY)
            if act in (Act.SERVE, Act.SERVE_TO_STOP):
                self._take_ready(server, str(said["ready"]), now_s, is_first=is_first)
            if act is Act.SERVE_TO_STOP:
                server.signal(self._stop_signal)
        elif "upgrade" in said:
            program = self._births.program.other(said["upgrade"], str(said["python_path"]))
            self._begin_upgrade(program, to_any=True)
        elif "ended" in said:
            if self._course.act_for(MountEvent.GONE) is Act.LET_GO:
                self._systemd.notify("STOPPING=1")
                self._holdings.drop_all()
                server.tell(dropped=True)
        elif "fatal" in said:
            server.fatal = str(said["fatal"])
        for fd in fds:
            os.close(fd)

    def _take_ready(self, server: Server, note: str, now_s: float, *, is_first: bool) -> None:
        server.ready_s = now_s
        self._restarts.ready(now_s)
        counts = self._holdings.counts
        if (follower := self._upgrades.follower) is not None:
            self._births.follow(follower.program, follower.template)
            self._upgrades.follower = None
            counts["upgrades"] += 1
        self._births.serves(server.formats)
        if is_first:
            self._births.release_terminal()
        else:
            pause_s = now_s - self._died_s
            counts["longest_pause_s"] = max(counts["longest_pause_s"], pause_s)
            self._log.say("INFO", f"server {server.pid} serves after a pause of {pause_s:.3f} s")
        self._holdings.note_counts()
        self._log.serves()
        self._systemd.notify("READY=1", f"STATUS={note}")
        be_spared_as(server, (os.getpid(), *(template.pid for template in self._templates())))

    def _look_at_templates(self, now_s: float) -> None:
        """Do what is due for the templates, and reap others that ended."""
        if self._births.is_awaited:
            # No reaping: the pid of a server that was forked just now is not known yet.
            self._await_birth(now_s)
            return
        server = self._server
        if server is not None and self._course.is_served:
            if self._births.keep_template(now_s):
                server.tell(next_server=self._births.next_server)
            follows = self._upgrades.run_due(server, now_s)
            if follows and self._course.act_for(MountEvent.FOLLOW) is Act.REPLACE:
                server.kill()  # its open files go to the next one
        reap_others([process.pid for process in self._linked()])

    def _begin_upgrade(self, program: Program, *, to_any: bool) -> None:
        server, why = self._server, ""
        if self._course.act_for(MountEvent.UPGRADE) is Act.REFUSE:
            server, why = None, "no server serves now"
        elif not self._holdings.can_go_on:
            why = "on this kernel no server can follow another: mount again"
        self._upgrades.begin(program, server, why, to_any=to_any)

    def _take_death(self, server: Server) -> None:
        for message in server.messages():  # what it said last
            self._act_on(server, message)
        status = status_of(server)
        self._server, self._kill_s = None, _NEVER_S
        self._upgrades.server_has_died()
        act = self._course.act_for(
            MountEvent.DIED if self._holdings.can_go_on else MountEvent.DIED_ALONE
        )
        if act is Act.START_AGAIN:
            self._go_on(server, status)
        elif act is Act.START_NEXT:
            self._died_s = self._start_s = time.monotonic()  # we ended it
            self._restarts.replaced()
        else:
            self._holdings.end_calls()
            if status is None:
                status = status_of(server, _REAP_WAIT_S)
            if act is Act.END_DEAD:
                self._log.say("ERROR", f"server {server.pid} {ended_how(status)}: {_DEAD}")
            self._exit_status = _SERVE_FAILED << 8 if status is None else status
        server.close()

    def _go_on(self, server: Server, status: int | None) -> None:
        """Note the death of a server that died by itself, and try another one."""
        self._upgrades.has_failed()
        now_s = time.monotonic()
        has_served = server.ready_s is not None and now_s - server.ready_s >= _ANSWERS_S
        if has_served or not self._died_s:
            # Callers of one that hung have waited since its last message.
            self._died_s = server.quiet_since_s if server.killed else now_s
        self._why = server.fatal or f"it {ended_how(status)}"
        self._log.say("ERROR", f"server {server.pid}: {self._why}: starting it again")
        self._holdings.counts["restarts"] += 1
        self._systemd.notify("STATUS=the server has died and is started again")
        own_fault = server.killed or server.fatal
        self._try_again(status, by_sigkill=was_sigkill(status) and not own_fault)

    def _try_again(self, status: int | None, *, by_sigkill: bool = False) -> None:
        """Start a server soon; or give up, and exit as the last one's wait *status* says."""
        now_s = time.monotonic()
        pause_s = self._restarts.died(now_s, by_sigkill=by_sigkill)
        if pause_s is None:
            self._go_without(MountEvent.NO_HOPE, status)
        else:
            self._start_s = now_s + pause_s

    def _go_without(self, event: MountEvent, status: int | None) -> None:
        """Act on *event* while there is no server; *status* is the wait status of the last one."""
        act = self._course.act_for(event)
        if act is Act.TRY_AGAIN:
            self._try_again(status)
            return
        self._holdings.end_calls()
        if act is Act.GIVE_UP:
            tries, again = self._restarts.deaths, back_again(self._births.program.arguments)
            self._log.say("ERROR", f"no server can be had: {_DEAD}; {again}")
            self._log.leave(f"{self._why}, after {tries} tries; {again}")
        self._exit_status = _SERVE_FAILED << 8 if status is None else status
