"""One server process, as its supervisor sees it: started, heard, told, and known to be dead."""

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence

from kvfs.machine.held_files import Message, link_pair, receive, send
from kvfs.machine.process_ends import has_exited


class Server:
    """A server and the link to it. Whoever starts it closes it."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        ready_fd: int,
        first: Mapping[str, object],
        held: Mapping[str, int],
        *,
        own_group: bool,
    ) -> None:
        """Start *command*, and tell it *first* and what is *held*. Raises OSError.

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
        self.pidfd = os.pidfd_open(self.pid)
        """Readable when the last of its threads has ended."""
        send(self.link, {"held": list(held), **first}, list(held.values()))

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
        return has_exited(self.pid)

    def signal(self, number: int) -> None:
        """Send it a signal; fine if it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.signal(signal.SIGKILL)

    def close(self) -> None:
        """Let go of it."""
        self.link.close()
        os.close(self.pidfd)


class Children:
    """The processes that have ended: our servers, and as pid 1 of a container whatever was left."""

    def __init__(self) -> None:
        self._statuses: dict[int, int] = {}

    def reap(self) -> None:
        """Take in all that have ended. As pid 1 there are strangers: each is forgotten."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                self._statuses[pid] = status

    def status_of(self, server: Server, wait_s: float = 0.0) -> int | None:
        """Return its wait status, None if *wait_s* was not enough."""
        until_s = time.monotonic() + wait_s
        while True:
            self.reap()
            if server.pid in self._statuses:
                return self._statuses[server.pid]
            if time.monotonic() >= until_s:
                return None
            time.sleep(0.005)
