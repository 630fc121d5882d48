"""Processes that make system calls as somebody else: another uid, umask, or just another pid.

A ``Caller`` is a small Python process that runs one call after the other by name and sends back
what came out, so a test reads ``nobody.os("mkdir", path, 0o777)``.
"""

import contextlib
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

from tests.support.forks.process import Process

#: What a call took or gave back: only the test knows its type.
Value: TypeAlias = Any

# Everything is imported while still root: the interpreter's own files may be closed to the uid.
_LOOP: Final = r"""
import builtins, codecs, copyreg, ctypes, encodings.idna, fcntl, io, mmap, os, pickle, socket, sys
uid, gid, umask, *groups = map(int, sys.argv[1:])
os.umask(umask)
os.chdir("/")
if uid != 0 or gid != 0 or groups:
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
modules = {"os": os, "fcntl": fcntl, "socket": socket}
out = sys.stdout.buffer
while True:
    try:
        module, name, args, kwargs = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    try:
        result = getattr(modules[module], name)(*args, **kwargs)
        answer = pickle.dumps(("done", result))
    except OSError as error:
        answer = pickle.dumps(("failed", error.errno))
    except BaseException as error:
        answer = pickle.dumps(("broken", repr(error)))
    out.write(answer)
    out.flush()
"""


class Caller:
    """One process with its own credentials; calls that fail raise OSError with the same errno."""

    def __init__(
        self,
        uid: int = 0,
        gid: int = 0,
        *,
        groups: Sequence[int] = (),
        umask: int = 0o022,
        prefix: Sequence[str] = (),
    ) -> None:
        """*prefix*: a command that starts it, such as nsenter(1)."""
        self.uid, self.gid = uid, gid
        numbers = [str(number) for number in (uid, gid, umask, *groups)]
        self._process = Process(
            [*prefix, sys.executable, "-c", _LOOP, *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> "Caller":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def send(self, module: str, name: str, *args: Value, **kwargs: Value) -> None:
        """Start a call without waiting for its end; ``receive`` takes the answer."""
        assert self._process.stdin is not None
        pickle.dump((module, name, args, kwargs), self._process.stdin)
        self._process.stdin.flush()

    def receive(self) -> Value:
        """Return what the started call returned; raises OSError as the call did."""
        assert self._process.stdout is not None
        kind, value = pickle.load(self._process.stdout)
        if kind == "failed":
            raise OSError(value, f"as uid {self.uid}")
        assert kind == "done", value
        return value

    def os(self, name: str, *args: Value, **kwargs: Value) -> Value:
        """Run ``os.<name>`` there."""
        self.send("os", name, *args, **kwargs)
        return self.receive()

    def try_open(self, path: str, flags: int, mode: int = 0o666) -> None:
        """Open and close there, for tests of whether that is allowed."""
        self.os("close", self.os("open", path, flags, mode))

    def fcntl(self, name: str, *args: Value) -> Value:
        """Run ``fcntl.<name>`` there."""
        self.send("fcntl", name, *args)
        return self.receive()

    def close(self) -> None:
        """End the process, whatever it waits for; its descriptors and locks go with it."""
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


@contextlib.contextmanager
def callers(count: int) -> Iterator[list[Caller]]:
    """Yield *count* processes of root and end them."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Caller()) for _ in range(count)]
