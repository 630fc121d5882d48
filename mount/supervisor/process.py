"""The supervisor of one mount: it starts the server, holds its open files, and starts it again.

It never touches the mount, so nothing that happens there can hold it up. What it holds is what the
servers gave it (kvfs/machine/held_files.py); of what that means it knows two things: without
``fuse`` no other server can go on, and what is written to ``abort`` ends all calls on the mount.
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvfs.machine.held_files import Message
from mount.supervisor.last_lines import ServersLog, release_terminal
from mount.supervisor.restarts import Restarts
from mount.supervisor.server import Children, Server
from mount.supervisor.systemd import Systemd

#: What another server needs to go on, and what ends the calls when there is none.
_FUSE: Final = "fuse"
_ABORT: Final = "abort"
#: A server that starts, and says nothing for so long, hangs.
_SILENT_MAX_S: Final = 15.0
#: From SIGABRT, at which a server that hangs says where, to SIGKILL.
_ABORTING_MAX_S: Final = 10.0
#: How long a dead server's last thread is waited for, once all calls have ended.
_REAP_WAIT_S: Final = 10.0
#: How often is looked for the end of a server's main thread, which no event tells of. Mostly all
#: threads end at once, of which one does.
_LOOK_S: Final = 0.25
#: kvfs.core.errors.ServeFailed, whose module is large.
_SERVE_FAILED: Final = 12
_DEAD: Final = "the mount is dead, and calls on it have ended with an error"
_STOPS: Final = (signal.SIGTERM, signal.SIGINT)
#: What a server gets that comes to us.
HANDED_ON: Final = (*_STOPS, signal.SIGHUP)


class Supervisor:
    """One mount's."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], ready_fd: int) -> None:
        """*command* starts the server, which says at *ready_fd* (-1: nowhere) how that went."""
        self._command = command
        self._systemd = Systemd(environment)
        self._environment = environment
        self._background = ready_fd >= 0
        self._ready_fd = ready_fd
        self._log = ServersLog()
        self._children = Children()
        self._held: dict[str, int] = self._systemd.kept
        #: Whether there is a mount that somebody may use.
        self._served = _FUSE in self._held
        self._server: Server | None = None
        self._restarts = Restarts()
        self._counts: dict[str, float] = {"restarts": 0, "upgrades": 0, "longest_pause_s": 0.0}
        self._died_s = time.monotonic() if self._served else 0.0
        #: When the next server is started.
        self._start_s = time.monotonic()
        self._stopping = 0
        self._kill_s = float("inf")
        self._said_alive_s = 0.0
        self._exit_status: int | None = None
        #: What the last server died of.
        self._why = ""
        self._wakeup, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for number in (*HANDED_ON, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)

    def run(self) -> int:
        """Supervise until the last server has ended; return its wait status."""
        while self._exit_status is None:
            now_s = time.monotonic()
            if self._server is None and now_s >= self._start_s:
                self._start(now_s)
            self._wait()
        return self._exit_status

    def _start(self, now_s: float) -> None:
        self._restarts.started(now_s)
        first = {
            **self._counts,
            "died_s": self._died_s,
            "supervisor_pid": os.getpid(),
            "alive_every_s": self._systemd.alive_every_s,
        }
        try:
            self._server = Server(
                self._command,
                self._environment,
                self._ready_fd,
                first,
                self._held,
                own_group=not self._background,
            )
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
        if server is not None:
            poll.register(server.pidfd, select.POLLIN)
            if not server.hung_up:
                poll.register(server.link, select.POLLIN)
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
        elif (silent_s := self._silent_max_s(self._server)) is not None:
            times.append(self._server.heard_s + silent_s)
        return min(times)

    def _silent_max_s(self, server: Server) -> float | None:
        """Return how long *server* may say nothing; None: for ever."""
        if server.is_ready:
            return self._systemd.watchdog_s or None
        return _SILENT_MAX_S if self._served else None

    def _watch(self, server: Server, now_s: float) -> None:
        """Do what is due while *server* lives."""
        if now_s >= self._said_alive_s + self._systemd.alive_every_s:
            self._said_alive_s = now_s
            self._systemd.notify("WATCHDOG=1")
        if now_s >= self._kill_s:
            self._kill_s = float("inf")
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
            self._hold(str(said["hold"]), fds.pop())
        elif "drop" in said:
            self._drop(str(said["drop"]))
            server.tell(dropped=True)
        elif "log" in said:
            self._log.is_at(str(said["log"]), str(said["name"]), str(said["dead_path"]))
        elif "alive" in said:
            self._restarts.alive(now_s)
            self._tell_progress(said["alive"])
        elif "ready" in said:
            self._take_ready(server, str(said["ready"]), now_s)
        elif "ended" in said:
            server.ended = True
            self._systemd.notify("STOPPING=1")
            self._drop_all()
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
        if self._background and not self._served:
            release_terminal()
        if self._served and self._died_s:
            pause_s = now_s - self._died_s
            self._counts["longest_pause_s"] = max(self._counts["longest_pause_s"], pause_s)
            self._log.say("INFO", f"server {server.pid} serves after a pause of {pause_s:.3f} s")
        self._served = True
        self._log.serves()
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

    def _hold(self, name: str, fd: int) -> None:
        before = self._held.get(name)
        self._held[name] = fd
        if before is not None:
            os.close(before)
        self._systemd.store(name, fd)

    def _drop(self, name: str) -> None:
        fd = self._held.pop(name, None)
        if fd is not None:
            self._systemd.remove(name)
            os.close(fd)

    def _drop_all(self) -> None:
        for name in list(self._held):
            self._drop(name)

    def _take_death(self, server: Server) -> None:
        for message in server.messages():  # what it said last
            self._take(server, message)
        status = self._children.status_of(server)
        self._server, self._kill_s = None, float("inf")
        if server.ended or self._stopping or not (self._served and _FUSE in self._held):
            self._end_calls()
            if status is None:
                status = self._children.status_of(server, _REAP_WAIT_S)
            if self._served and not server.ended:
                self._log.say("ERROR", f"server {server.pid} {ended_how(status)}: {_DEAD}")
            self._exit_status = _SERVE_FAILED << 8 if status is None else status
        else:
            if server.is_ready or not self._died_s:
                self._died_s = time.monotonic()
            self._why = server.fatal or f"it {ended_how(status)}"
            why = server.fatal or ended_how(status)
            self._log.say("ERROR", f"server {server.pid} {why}: starting it again")
            self._counts["restarts"] += 1
            self._systemd.notify("STATUS=the server has died and is started again")
            self._try_again(status)
        server.close()

    def _try_again(self, status: int | None) -> None:
        """Start a server soon; or give up, as what the last one's wait *status* says."""
        now_s = time.monotonic()
        pause_s = self._restarts.died(now_s) if self._served else None
        if pause_s is not None:
            self._start_s = now_s + pause_s
            return
        self._end_calls()
        if self._served:
            self._log.say("ERROR", f"no server can be had: {_DEAD}")
            self._log.leave(self._why)
        self._exit_status = _SERVE_FAILED << 8 if status is None else status

    def _end_calls(self) -> None:
        """Let all calls on the mount end with ENOTCONN; nothing happens if they have."""
        with contextlib.suppress(OSError):
            if _ABORT in self._held:
                os.write(self._held[_ABORT], b"1")
        self._drop_all()


def ended_how(status: int | None) -> str:
    """Return the words for a wait status; None stands for a thread that the kernel holds up."""
    if status is None:
        return "was killed"
    if os.WIFSIGNALED(status):
        return f"was killed by signal {os.WTERMSIG(status)}"
    return f"ended with exit code {os.waitstatus_to_exitcode(status)}"
