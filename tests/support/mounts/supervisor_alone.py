"""A supervisor by itself: its servers are programs that do as a test tells them.

Each holds a file as ``fuse``, so that another may follow; no mount is needed.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tests.support.clients.stepping import STEP_WAIT_S, until
from tests.support.mounts.mounting import ROOT
from tests.support.mounts.supervised import templates_of
from tests.support.mounts.unsupervised import supervisor_of

#: A template, and its servers: what these say goes to a socket of datagrams, what they are told
#: comes from there.
SERVER: Final = f"""
import json, os, signal, socket, sys
WHY, FORMATS = "", {{"table": 7}}
SILENT_MAX_S = 0.0
def why_not(formats):
    return WHY if formats == FORMATS else "it is not told"
sys.path.insert(0, {str(ROOT)!r})
from kvfs.machine.held_files import HeldFiles, SupervisorGone
from mount.process.template import fork_servers
def import_all():
    pass
try:
    forked = fork_servers(int(sys.argv[sys.argv.index("--template-fd") + 1]), import_all, why_not)
    held = HeldFiles(forked.link_fd)
except SupervisorGone:
    sys.exit()
test = socket.socket(fileno=os.dup(int(sys.argv[1])))
given = {{name: os.readlink(f"/proc/self/fd/{{fd}}") for name, fd in held.given.items()}}
figures = {{"restarts": held.restarts, "upgrades": held.upgrades, "given": given}}
figures |= {{"pid": os.getpid(), "notify": "NOTIFY_SOCKET" in os.environ}}
test.send(json.dumps(figures).encode())
signal.signal(signal.SIGTERM, lambda *_: test.send(b'"TERM"'))
signal.signal(signal.SIGHUP, lambda *_: test.send(b'"HUP"'))
while order := test.recv(65536):
    exec(order.decode())
    test.send(b'"done"')
"""
#: Let the supervisor hold two files: one that the next server needs, and what ends all calls.
HOLD: Final = """
held.hold("fuse", os.open("{place}/fuse", os.O_CREAT | os.O_RDWR))
held.hold("abort", os.open("{place}/abort", os.O_CREAT | os.O_WRONLY))
held.say_log("{place}/log", "kv", "{place}/dead")
held.say_ready("serving /pool at /kv", FORMATS, SILENT_MAX_S)
"""
DIE: Final = "os.kill(os.getpid(), signal.SIGKILL)"
#: The same, of another version.
ANOTHER: Final = SERVER.replace("WHY,", "held_by = 'another'; WHY,", 1)
FREEZE: Final = "os.kill(os.getpid(), signal.SIGSTOP)"


def upgrade(program: str) -> str:
    """Return what a server does that lets the one of *program* follow."""
    return f"held.ask_for_upgrade({[sys.executable, '-c', program]!r}, '')"


class Supervised:
    """A supervisor, with whichever server it has."""

    def __init__(self, place: Path, process: "subprocess.Popen[bytes]", end: socket.socket) -> None:
        self.place = place
        self.process = process
        self._end = end

    def told(self) -> Any:  # noqa: ANN401 - JSON
        """Return what a server says next."""
        assert select.select([self._end], [], [], STEP_WAIT_S)[0], "nothing is said"
        return json.loads(self._end.recv(65536))

    def tell(self, program: str, *, answers: bool = True) -> None:
        """Let the server run *program*."""
        self._end.send(program.replace("{place}", str(self.place)).encode())
        if answers:
            assert self.told() == "done"

    def aborted(self) -> str:
        """Return what was written to ``abort``."""
        return (self.place / "abort").read_text()

    def log(self) -> str:
        return (self.place / "log").read_text()

    def wait(self) -> int:
        return self.process.wait(STEP_WAIT_S)


@contextlib.contextmanager
def supervised(
    place: Path, environment: Mapping[str, str] | None = None, program: str = SERVER
) -> Iterator[Supervised]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command, inherited = supervisor_of(program, [str(theirs.fileno())], -1)
    os.set_inheritable(theirs.fileno(), True)
    with (
        ours,
        subprocess.Popen(
            command,
            env={**inherited, **(environment or {})},
            pass_fds=[theirs.fileno()],
            stderr=subprocess.DEVNULL,
        ) as process,
    ):
        theirs.close()
        try:
            yield Supervised(place, process, ours)
        finally:
            process.kill()  # and the server ends with the socket


@contextlib.contextmanager
def supervisor_stopped(one: Supervised) -> Iterator[None]:
    """Stop the supervisor of *one*: what happens meanwhile it sees all at once."""
    one.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        one.process.send_signal(signal.SIGCONT)


def template_of(one: Supervised, before: int = 0) -> int:
    """Return the process of which the servers of *one* are forked, once it is not *before*."""
    found: list[int] = []

    def is_there() -> bool:
        found[:] = set(templates_of(one.process.pid)) - {before}
        return len(found) == 1

    until(is_there, "a template has begun")
    return found[0]
