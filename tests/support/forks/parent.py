"""``python -P -m tests.support.forks.parent SOCKET PID``: the parent of what tests start.

It has imported kvfs, mount and what they need once, and forks for each who connects to SOCKET: a
process that is told its command line, environment, directory and descriptors becomes that program
(becoming.py). It ends with the process PID, whose it is; its children live on.

A message is a pickled tuple; the descriptors come beside it (SCM_RIGHTS).
"""

import contextlib
import gc
import importlib
import os
import pickle
import pkgutil
import select
import shutil
import signal
import socket
import sys
from typing import Final

from tests.support.forks.becoming import blocked_signals, fork
from tests.support.forks.names import take_name
from tests.support.forks.orders import Order
from tests.support.forks.programs import (
    CANNOT,
    FDS_MAX,
    MESSAGE_MAX_BYTES,
    READY,
    program_of_tests,
)
from tests.support.forks.started import fork_what_it_starts

_BACKLOG: Final = 32


class _Child:
    """A process and who waits for it. It is a zombie until that one has let go, as of its own."""

    def __init__(self, pid: int, asker: socket.socket) -> None:
        self.pid, self.asker = pid, asker
        self.pidfd = os.pidfd_open(pid)
        self.has_ended = False


def _import_all() -> None:
    """Import what commands and servers do: each module of theirs, but the programs themselves."""
    import kvfs
    import mount

    for package in (kvfs, mount):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            # What is run as a program has to find itself not imported, as if it were new. Bridges
            # are imported where an engine is.
            if not found.name.endswith("__main__") and ".bridges." not in found.name:
                importlib.import_module(found.name)


class _Parent:
    def __init__(self, listener: socket.socket, owner_fd: int) -> None:
        self._listener, self._owner_fd = listener, owner_fd
        self._children: dict[int, _Child] = {}
        """By the number of their asker's connection, and of their pidfd until they have ended."""
        self._poll = select.poll()
        for fd in (listener.fileno(), owner_fd):
            self._poll.register(fd, select.POLLIN)

    def run(self) -> None:
        """Serve until the owner has ended."""
        while True:
            for fd, _event in self._poll.poll():
                if fd == self._owner_fd:
                    return
                if fd == self._listener.fileno():
                    self._accept()
                elif (child := self._children.get(fd)) is not None:
                    self._look(child, fd)

    def _accept(self) -> None:
        asker, _ = self._listener.accept()
        fds: list[int] = []
        try:
            message, fds, _, _ = socket.recv_fds(asker, MESSAGE_MAX_BYTES, FDS_MAX)
            if not message:
                asker.close()
                return
            order: Order = pickle.loads(message)
            program = program_of_tests(order.words, order.directory)
            assert program is not None

            def first() -> None:
                self._leave(asker)
                self._be_as(order)

            streams = dict(zip(order.streams, fds, strict=True))
            with blocked_signals() as mask:
                child = _Child(fork(program, order.environment, streams, first, mask), asker)
            asker.send(pickle.dumps(child.pid))
        finally:
            for fd in fds:
                os.close(fd)
        for fd in (asker.fileno(), child.pidfd):
            self._children[fd] = child
            self._poll.register(fd, select.POLLIN)

    def _leave(self, asker: socket.socket) -> None:
        """In the child: close what is the parent's alone, so that no object does it later."""
        for child in set(self._children.values()):
            child.asker.close()
        asker.close()
        self._listener.close()

    def _be_as(self, order: Order) -> None:
        """In the child: be what *order* says, but for the program."""
        signal.signal(signal.SIGINT, _AT_SIGINT)
        if order.new_session:
            os.setsid()
        os.chdir(order.directory)

    def _look(self, child: _Child, fd: int) -> None:
        self._poll.unregister(fd)
        if fd == child.pidfd:
            child.has_ended = True
            ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            with contextlib.suppress(OSError):
                child.asker.send(pickle.dumps((ended.si_code, ended.si_status)))
            del self._children[fd]
            os.close(fd)
            if child.asker.fileno() >= 0:
                return
        else:  # whoever has asked has seen its end, or does not wait for it
            del self._children[fd]
            child.asker.close()
        if child.has_ended:
            os.waitpid(child.pid, 0)


#: What a program of ours does at Ctrl-C; the parent itself ends with its owner alone.
_AT_SIGINT: Final = signal.getsignal(signal.SIGINT)


def main() -> int:
    """Import all, say so, and fork until the owner has ended."""
    path, owner = sys.argv[1], int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _import_all()
    fork_what_it_starts()
    gc.collect()
    # No fork looks at these objects again, which would copy the memory that they lie in.
    gc.freeze()
    try:
        take_name(sys.orig_argv, os.environ)
    except OSError:
        os.write(1, CANNOT)
        return 0
    try:
        owner_fd = os.pidfd_open(owner)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(path)
            listener.listen(_BACKLOG)
            os.write(1, READY)
            os.close(1)
            _Parent(listener, owner_fd).run()
    except ProcessLookupError:
        pass  # it has ended meanwhile
    finally:
        if os.getpid() == _PID:
            shutil.rmtree(os.path.dirname(path), ignore_errors=True)
    return 0


_PID: Final = os.getpid()

if __name__ == "__main__":
    sys.exit(main())
