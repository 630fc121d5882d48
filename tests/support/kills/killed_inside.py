"""Servers that are killed at a chosen point of a chosen request, and a new one takes over.

The server is the real one. Python imports ``sitecustomize`` at its start (site.rst), and ours wraps
some of the server's functions: each looks for a file that says where to die, and removes it first,
so that the next server lives.
"""

import os
import subprocess
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from kvfs.machine.mount_table import FUSE_DEVICE
from mount.fuse.wire import OPEN_OUT, OUT_HEADER_BYTES, Opcode
from mount.supervisor.states import SHORT_LIFE_S
from tests.support.clients.stepping import until
from tests.support.mounts.mounting import Mounted

OPENED_BYTES: Final = OUT_HEADER_BYTES + OPEN_OUT.size
_POINTS_NAME: Final = "KVFS_TEST_DIE_AT"
#: Name of a point: module, class, method, and whether to die before or after its body.
POINTS: Final = {
    "read": ("mount.fuse.channel", "Channel", "_answer_or_hand_on", "before"),
    "reply": ("mount.fuse.channel", "Channel", "reply", "before"),
    "answered": ("mount.fuse.channel", "Channel", "reply", "after"),
    "before commit": ("kvfs.storage.journal", "Commits", "write", "before"),
    "committed": ("kvfs.storage.journal", "Commits", "write", "after"),
    "kept": ("kvfs.storage.journal", "Journal", "keep", "after"),
    "announced": ("kvfs.storage.journal", "Journal", "intend", "after"),
    "row": ("mount.files.handles", "Handles", "open", "before"),
    "row written": ("mount.files.handles", "Handles", "open", "after"),
    "left": ("mount.files.handles", "Handles", "leave", "before"),
    "registered": ("mount.fuse.kernel", "", "open_backing", "after"),
}
_PROGRAM: Final = f"""
import importlib.abc, importlib.machinery, os, signal, struct, sys

POINTS = {POINTS!r}
AT = os.environ["{_POINTS_NAME}"]
present = [0]
codes = {{}}

def die_at(point):
    try:
        with open(AT) as file:
            wanted, code = file.read().split(":")
    except FileNotFoundError:
        return
    if wanted == point and present[0] == int(code):
        os.unlink(AT)
        os.kill(os.getpid(), signal.SIGKILL)
        os.read(os.pipe()[0], 1)  # it is dead before that ends

def wrapped(point, when, body):
    def call(*args, **named):
        if point == "read":
            (code, unique) = struct.unpack_from("<IQ", args[0]._buffer, 4)
            present[0] = codes[unique] = code
        elif point in ("reply", "answered"):
            (unique,) = struct.unpack_from("<Q", args[1], 8)
            present[0] = codes.get(unique, 0)
        if when == "before":
            die_at(point)
        found = body(*args, **named)
        if when == "after":
            die_at(point)
        return found
    return call

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if not any(point[0] == name for point in POINTS.values()):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            for point, (where, owner, method, when) in POINTS.items():
                if where == name:
                    holder = getattr(module, owner) if owner else module
                    setattr(holder, method, wrapped(point, when, getattr(holder, method)))
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


class KilledInside:
    """A mount whose servers are killed as a test says."""

    def __init__(self, mounted: Mounted, order: Path) -> None:
        self.mounted = mounted
        self._order = order
        self._since_s = time.monotonic()

    @property
    def path(self) -> Path:
        """The mounted tree."""
        return self.mounted.path

    def kill_at(self, point: str, code: Opcode | int = 0) -> None:
        """Have the server die at *point* of the next request *code*; 0: that the reader answers."""
        self.let_live()
        new = self._order.with_suffix(".new")
        new.write_text(f"{point}:{int(code)}")
        new.rename(self._order)

    def let_live(self) -> None:
        """Let a server live so long that its death is none of a mount that cannot be served."""
        until(lambda: time.monotonic() - self._since_s >= SHORT_LIFE_S, "it has lived long enough")

    def has_come_there(self) -> bool:
        """Whether a server has come to the point where it dies."""
        return not self._order.exists()

    def assert_killed(self) -> None:
        """Assert that it has died there, and that another one serves."""
        until(self.has_come_there, "the server comes to that point")
        self.mounted.follow_server()
        self._since_s = time.monotonic()

    @contextmanager
    def killed_answering(self) -> Iterator[None]:
        """Have the server die as it writes its next answer to the kernel, before that is written.

        For the compiled reader, whose functions nobody can wrap.
        """
        self.let_live()
        kill = ("-e", "trace=write", "-e", "inject=write:signal=KILL:when=1", "-P", FUSE_DEVICE)
        command = ["strace", "-f", *kill, "-p", str(self.mounted.status()["server_pid"])]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
            assert strace.stderr is not None
            try:
                while "attached" not in (line := strace.stderr.readline()):
                    assert line, "strace has ended"
                yield
                self.mounted.follow_server()
                self._since_s = time.monotonic()
            finally:
                strace.kill()  # it may wait for ever for a thread of what it killed
            said = strace.stderr.read()
        assert f", {OPENED_BYTES}" in said, f"another answer than to an open: {said}"

    def kill(self) -> None:
        """Kill the server now; the next call waits for another one."""
        self.let_live()
        self.mounted.kill_server()
        self._since_s = time.monotonic()


@contextmanager
def killed_inside(
    source: str, place: Path, patch: pytest.MonkeyPatch, *flags: str
) -> Iterator[KilledInside]:
    """Mount *source* in *place* with such servers."""
    programs = place / "programs"
    programs.mkdir()
    (programs / "sitecustomize.py").write_text(textwrap.dedent(_PROGRAM))
    order = place / "die-at"
    patch.setenv("PYTHONPATH", str(programs), prepend=os.pathsep)
    patch.setenv(_POINTS_NAME, str(order))
    with Mounted(source, place / "kv", *flags) as mounted:
        yield KilledInside(mounted, order)
