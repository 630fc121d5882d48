"""One server process, as its supervisor sees it: its messages, and whether it has died."""

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Collection, Mapping
from typing import Final

from kvfs.machine.held_files import Message, receive, send
from kvfs.machine.process_ends import device_wait, has_exited

#: How often to check a process that should have ended.
_REAP_LOOK_S: Final = 0.005
#: At most this much of the time between two looks counts as silence. If more has passed, we were
#: held up ourselves (a paused container), and perhaps the server, too.
_LOOK_MAX_S: Final = 1.0
#: From SIGABRT, which makes a hung server log where it hangs, to SIGKILL.
_ABORTING_MAX_S: Final = 10.0


class Linked:
    """A child process and the link to it."""

    def __init__(self, pid: int, link: socket.socket) -> None:
        """Take over *link*, whose other end *pid* has: a child of ours, not reaped yet."""
        self.pid = pid
        self.link = link
        self.link.setblocking(False)
        self.hung_up = False
        """Whether it has closed its end of the link, or died."""
        self.pidfd = os.pidfd_open(pid)
        """Readable when the last of its threads has ended."""

    def messages(self) -> list[Message]:
        """Return its messages since the last call, without waiting."""
        came: list[Message] = []
        with contextlib.suppress(BlockingIOError):
            while not self.hung_up:
                message = receive(self.link)
                if message is None:
                    self.hung_up = True
                else:
                    came.append(message)
        return came

    def tell(self, **said: object) -> bool:
        """Send it a message; False if it is gone."""
        return send(self.link, said)

    def has_died(self) -> bool:
        """Whether its main thread has ended; the kernel may still hold up others.

        No event tells of that (PIDFD_THREAD did, from Linux 6.9 to 6.14), so /proc is read.
        """
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0)) or has_exited(self.pid)

    def signal(self, number: int) -> None:
        """Send it a signal. Nothing happens if it is gone, even if its pid is in use again."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """Kill it."""
        self.signal(signal.SIGKILL)

    def end(self) -> None:
        """Kill it, and ``close``: it is not needed."""
        self.kill()
        self.close()

    def close(self) -> None:
        """Close the link and the pidfd."""
        self.link.close()
        os.close(self.pidfd)


class Server(Linked):
    """A server and the link to it. The object that had it forked closes it."""

    def __init__(self, pid: int, link: socket.socket) -> None:
        """Take over *link*, whose other end the server *pid* has."""
        super().__init__(pid, link)
        self.silent_s = 0.0
        """For how long it has said nothing."""
        self._looked_s = time.monotonic()
        self.silent_max_s = 0.0
        """For how long it may be silent, as it says when it is ready; 0: for ever."""
        self._told_wait = False
        """Whether ``device_wait`` has told of its present silence."""
        self.killed = False
        """Whether we ended it because it hung."""
        self.quiet_since_s = 0.0
        """If it hung: since when it had said nothing (monotonic)."""
        self.ready_s: float | None = None
        """When it was ready; None: it was not."""
        self.fatal = ""
        """Why it cannot serve, as it says."""
        self.version = ""
        self.formats: dict[str, int] = {}
        """Its formats; it tells version and formats when it is ready."""

    def begin(self, first: Mapping[str, object], held: Mapping[str, int]) -> None:
        """Have it serve with the files *held*; *first* is what the first message says besides."""
        send(self.link, {"held": list(held), **first}, list(held.values()))

    def messages(self) -> list[Message]:
        """Return its messages since the last call, without waiting."""
        came = super().messages()
        now_s = time.monotonic()
        self.silent_s = 0.0 if came else self.silent_s + min(now_s - self._looked_s, _LOOK_MAX_S)
        self._looked_s = now_s
        self._told_wait = self._told_wait and not came
        return came

    def device_wait(self) -> str | None:
        """Return a line if it is silent because it waits in the kernel for its device; None: no.

        The line is empty if it was told before. Such a server goes on when the device answers. A
        kill would end it only then, too, and until then it would keep the mount and the source from
        any other server.
        """
        wait = device_wait(self.pid)
        if wait is None or self._told_wait:
            return None if wait is None else ""
        self._told_wait = True
        return f"server {self.pid} waits in the kernel for its device ({wait}): left alone"

    def abort(self, silent_s: float, now_s: float) -> float:
        """End it, as it hangs: have it log where. Return when (monotonic) it is to be killed.

        *silent_s* is how long it may be silent: one that may not be for long is killed sooner.
        """
        self.quiet_since_s = now_s - self.silent_s
        self.silent_s, self.killed = 0.0, True
        self.signal(signal.SIGABRT)
        return now_s + min(_ABORTING_MAX_S, silent_s / 6)


def status_of(process: Linked, wait_s: float = 0.0) -> int | None:
    """Return the wait status of *process*, None if *wait_s* was not enough."""
    until_s = time.monotonic() + wait_s
    while True:
        pid, status = os.waitpid(process.pid, os.WNOHANG)
        if pid:
            return status
        if time.monotonic() >= until_s:
            return None
        time.sleep(_REAP_LOOK_S)


def ended_how(status: int | None) -> str:
    """Return the words for a wait *status*; None: the kernel still holds up a thread."""
    if status is None:
        return "was killed"
    if os.WIFSIGNALED(status):
        return f"was killed by signal {os.WTERMSIG(status)}"
    return f"ended with exit code {os.waitstatus_to_exitcode(status)}"


def was_sigkill(status: int | None) -> bool:
    """Whether wait *status* means SIGKILL, by an operator or for lack of memory; None does."""
    return status is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL)


def be_spared_as(server: Server, pids: Collection[int]) -> None:
    """Give the processes *pids* the OOM killer's score adjustment of *server*."""
    with contextlib.suppress(OSError):
        with open(f"/proc/{server.pid}/oom_score_adj", "rb") as theirs:
            score = theirs.read()
        for pid in pids:
            with open(f"/proc/{pid}/oom_score_adj", "wb") as ours:
                ours.write(score)


def reap_others(ours: Collection[int]) -> None:
    """Reap all that have ended but *ours*: orphans below us become our children."""
    with contextlib.suppress(ChildProcessError):
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid in ours:
                return
            os.waitpid(ended.si_pid, 0)
