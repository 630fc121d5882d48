"""Programs of this tree, started by a fork of a parent that has imported all of it once.

``Process`` is ``subprocess.Popen`` and ``run`` is ``subprocess.run``, with the same arguments and
the same answers. A start of an interpreter with kvfs costs 0.1 to 0.7 s of CPU, a fork some 5 ms;
of the tests' time that was a third (docs/dev/measuring.md, "Where the tests' time goes").

What a fork cannot do is done by exec: a program that is not of this tree, a prefix such as
unshare(1), other limits, namespaces, capabilities or ignored signals than those the run began with,
an environment that Python itself heeds. A test about what a new interpreter does, or about what it
weighs, is marked ``real_exec``. With KVFS_TEST_EXEC=1 all is done by exec.
"""

import atexit
import contextlib
import os
import pickle
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

from tests.support.forks.orders import Order
from tests.support.forks.programs import (
    CANNOT,
    FDS_MAX,
    MESSAGE_MAX_BYTES,
    READY,
    ROOT,
    program_of_tests,
    read_at_start,
    standing,
)

#: Of waitid(2): how a process has ended.
_KILLED: Final = (os.CLD_KILLED, os.CLD_DUMPED)


class Parent:
    """The parent of this process's forks; it is started when the first one is wanted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._standing: tuple[str, ...] = ()
        self._heeded = read_at_start(os.environ)
        self._process: subprocess.Popen[bytes] | None = None
        self._path = ""
        self.forked = 0
        """How many processes were started by a fork."""
        #: How many blocks want exec; KVFS_TEST_EXEC=1 wants it all the time.
        self._execs = int(os.environ.get("KVFS_TEST_EXEC") == "1")

    def note_standing(self) -> None:
        """Fork from now on for whoever stands as this process does now; else exec does it."""
        self._standing = standing()
        self._heeded = read_at_start(os.environ)

    @property
    def pid(self) -> int:
        """The parent's id; 0 before the first fork."""
        return 0 if self._process is None else self._process.pid

    @contextlib.contextmanager
    def by_exec(self) -> Iterator[None]:
        """Start nothing by a fork inside the block."""
        self._execs += 1
        try:
            yield
        finally:
            self._execs -= 1

    def may_start(self, order: Order) -> bool:
        """Whether a fork is all that *order* wants."""
        if not self._standing:
            self.note_standing()
        try:
            directory = order.directory or os.getcwd()
        except FileNotFoundError:
            return False
        return (
            not self._execs
            and len(order.streams) <= FDS_MAX
            and program_of_tests(order.words, directory) is not None
            and read_at_start(order.environment) == self._heeded
            and standing() == self._standing
        )

    def start(self, order: Order) -> "tuple[int, socket.socket] | None":
        """Return the new process, and where its end is told; None if it is a case for exec."""
        streams = {number: fd for number, fd in order.streams.items() if _is_open(fd)}
        directory = order.directory or os.getcwd()
        message = pickle.dumps(order._replace(streams=streams, directory=directory))
        if len(message) > MESSAGE_MAX_BYTES or not os.path.isdir(directory):
            return None
        with self._lock:
            if self._process is None:
                self._begin()
        if not self._path:
            return None
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            link.connect(self._path)
            socket.send_fds(link, [message], list(streams.values()))
            pid = int(pickle.loads(link.recv(MESSAGE_MAX_BYTES)))
            self.forked += 1
            return pid, link
        except BaseException:
            link.close()
            raise

    def _begin(self) -> None:
        self._path = tempfile.mkdtemp(prefix=f"kvfs-test-{os.getpid()}-forks-") + "/socket"
        command = [sys.executable, "-P", "-m", "tests.support.forks.parent"]
        places = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [*command, self._path, str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            cwd="/",
            # One thread: a fork has no other, and a lock that one held would stay locked.
            env={**os.environ, "PYTHONPATH": places, "OPENBLAS_NUM_THREADS": "1"},
        )
        assert self._process.stdout is not None
        with self._process.stdout as told:
            said = told.read()
        atexit.register(self._end)
        assert said in (READY, CANNOT), "the parent of forks has not come up"
        if said == CANNOT:
            os.rmdir(os.path.dirname(self._path))
            self._path = ""

    def _end(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


#: The one of this process: what it is told of itself when this is imported is the usual.
PARENT: Final = Parent()


class Process(subprocess.Popen[Any]):
    """A process that was forked, if it can be, and else started by exec."""

    _link: socket.socket | None = None

    # These three are Popen's own methods, which no document names (orders.py).
    def _execute_child(self, *given: object) -> None:
        order = Order.of(given)
        started = PARENT.start(order) if order and PARENT.may_start(order) else None
        if order is None or started is None:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        self.pid, self._link = started
        self._child_created = True
        self._close_pipe_fds(*order.pipes)  # type: ignore[attr-defined]

    def _try_wait(self, flags: int) -> tuple[int, int]:
        """Return the process and its wait status, as waitpid(2) would; (0, 0): it lives."""
        link = self._link
        if link is None:
            found: tuple[int, int] = super()._try_wait(flags)  # type: ignore[misc]
            return found
        if flags & os.WNOHANG and not select.select([link], [], [], 0)[0]:
            return 0, 0
        told = link.recv(MESSAGE_MAX_BYTES)
        assert told, "the parent of forks has died"
        how, number = pickle.loads(told)
        # It is a zombie until here, so that its number is nobody else's.
        link.close()
        self._link = None
        dumped = 0x80 if how == os.CLD_DUMPED else 0
        return self.pid, number | dumped if how in _KILLED else number << 8

    def _internal_poll(self, _deadstate: int | None = None, **_: object) -> int | None:
        if self._link is None:
            code: int | None = super()._internal_poll(_deadstate)  # type: ignore[misc]
            return code
        lock: threading.Lock = self._waitpid_lock  # type: ignore[attr-defined]
        if self.returncode is None and lock.acquire(blocking=False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid == self.pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                lock.release()
        return self.returncode


def run(
    words: Sequence[str | os.PathLike[str]],
    *,
    input: str | bytes | None = None,  # noqa: A002 - as subprocess.run calls it
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **more: Any,  # noqa: ANN401 - whatever Popen takes
) -> "subprocess.CompletedProcess[Any]":
    """Run a program to its end; the arguments and errors are those of ``subprocess.run``."""
    if input is not None:
        more["stdin"] = subprocess.PIPE
    if capture_output:
        more |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Process(words, **more) as process:
        try:
            printed, said = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(words, process.returncode, printed, said)
    if check:
        done.check_returncode()
    return done
