"""One server process, as its supervisor sees it: started, heard, told, and known to be dead."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Final

from kvfs.machine.held_files import Message, link_pair, receive, send
from kvfs.machine.process_ends import has_exited

#: How often a process that should have ended is looked at.
_REAP_LOOK_S: Final = 0.005


class Server:
    """A server and the link to it. Whoever starts it closes it."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        ready_fd: int = -1,
        own_group: bool,
    ) -> None:
        """Start *command*, which waits until it is told to begin. Raises OSError.

        It has *ready_fd*, if that is not -1, to say there how its start went. *own_group* is for a
        terminal, whose Ctrl-C comes to us alone then: we hand it on.
        """
        self.link, theirs = link_pair()
        flags = ["--held-fd", str(theirs.fileno())]
        try:
            theirs.set_inheritable(True)
            if ready_fd >= 0:
                os.set_inheritable(ready_fd, True)
                flags += ["--ready-fd", str(ready_fd)]
            group = 0 if own_group else os.getpgrp()
            self.pid = os.posix_spawn(command[0], [*command, *flags], environment, setpgroup=group)
        except BaseException:
            self.link.close()
            raise
        finally:
            theirs.close()
        self.link.setblocking(False)
        self.heard_s = time.monotonic()
        """When it said something last."""
        self.is_ready = False
        self.ended = False
        """Whether it has said that the mount is gone."""
        self.hung_up = False
        """Whether it has closed its end of the link, or died."""
        self.fatal = ""
        """Why it cannot serve, as it says."""
        self.version = ""
        self.formats: dict[str, int] = {}
        """What it uses, as it says when it is ready; and its version."""
        self.pidfd = os.pidfd_open(self.pid)
        """Readable when the last of its threads has ended."""

    def begin(self, first: Mapping[str, object], held: Mapping[str, int]) -> None:
        """Let it serve, with what is *held*; *first* is the first message, without these."""
        self.heard_s = time.monotonic()
        send(self.link, {"held": list(held), **first}, list(held.values()))

    def check(self, formats: Mapping[str, int]) -> None:
        """Ask whether it can follow a server that uses *formats*."""
        send(self.link, {"check": dict(formats)})

    def messages(self) -> list[Message]:
        """Return what it has said since, without waiting."""
        came: list[Message] = []
        with contextlib.suppress(BlockingIOError):
            while not self.hung_up:
                message = receive(self.link)
                if message is None:
                    self.hung_up = True
                else:
                    came.append(message)
                    self.heard_s = time.monotonic()
        return came

    def tell(self, **said: object) -> bool:
        """Send it a message; False if it is gone."""
        return send(self.link, said)

    def has_died(self) -> bool:
        """Whether its main thread has ended, though the kernel may hold up others of it yet.

        No event tells of that (PIDFD_THREAD did, from Linux 6.9 to 6.14): /proc does.
        """
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0)) or has_exited(self.pid)

    def signal(self, number: int) -> None:
        """Send it a signal; fine if it is gone, and perhaps its number another's."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """Kill it."""
        self.signal(signal.SIGKILL)

    def end(self) -> None:
        """Kill it, and let go of it: it is not needed."""
        self.kill()
        self.close()

    def close(self) -> None:
        """Let go of it."""
        self.link.close()
        os.close(self.pidfd)


def status_of(server: Server, wait_s: float = 0.0) -> int | None:
    """Return the wait status of *server*, None if *wait_s* was not enough."""
    until_s = time.monotonic() + wait_s
    while True:
        pid, status = os.waitpid(server.pid, os.WNOHANG)
        if pid:
            return status
        if time.monotonic() >= until_s:
            return None
        time.sleep(_REAP_LOOK_S)


def ended_how(status: int | None) -> str:
    """Return the words for a wait status; None stands for a thread that the kernel holds up."""
    if status is None:
        return "was killed"
    if os.WIFSIGNALED(status):
        return f"was killed by signal {os.WTERMSIG(status)}"
    return f"ended with exit code {os.waitstatus_to_exitcode(status)}"


def reap_others(server: Server | None) -> None:
    """Take in all that have ended but *server*; as pid 1 of a container there are strangers."""
    with contextlib.suppress(ChildProcessError):
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or (server is not None and ended.si_pid == server.pid):
                return
            os.waitpid(ended.si_pid, 0)
