"""An NFS client in a process of its own, inside a network of its own: it may be killed, or hang.

``with NfsClient(network, 3, "/pool", "one") as client`` mounts; ``client.call("stat", "/name")``
does what ``libnfs.Nfs`` has under that name. ``python -m tests.support.nfs.client`` is the process.
"""

import contextlib
import errno
import pickle
import select
import subprocess
import sys
from typing import IO, Final, Self

from tests.support.clients.callers import Value
from tests.support.machines.own_network import Network
from tests.support.nfs.libnfs import Nfs

#: More than libnfs waits for a call: one that lists many names is many.
ANSWER_WAIT_S: Final = 150.0


class NfsClient:
    """The test's side; leaving the context ends the process."""

    def __init__(
        self,
        network: Network,
        version: int,
        export: str,
        name: str,
        *,
        retries: int = 0,
        program: str = "tests.support.nfs.client",
    ) -> None:
        """Start it and mount. Raises OSError when the server does not let it.

        *program* is a module that ends in ``serve``, with more calls than ``Nfs`` has.
        """
        command = ("-m", program, str(version), export, name, str(retries))
        self._process = subprocess.Popen(
            network.inside(sys.executable, *command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self.name = name
        try:
            self.answer()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, name: str, *arguments: Value) -> Value:
        """Call ``Nfs.<name>`` there. Raises OSError with its errno."""
        self.begin(name, *arguments)
        return self.answer()

    def begin(self, name: str, *arguments: Value) -> None:
        """Begin a call; ``answer`` waits for its end."""
        assert self._process.stdin is not None
        message = memoryview(pickle.dumps((name, arguments)))
        while message:  # a raw pipe takes what fits
            message = message[self._process.stdin.write(message) :]

    def answer(self) -> Value:
        """Return what the call returned that was begun."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_WAIT_S)
        assert ready, f"client {self.name}: no answer for {ANSWER_WAIT_S} s"
        kind, value = pickle.load(_Whole(self._process.stdout))
        if kind == "failed":
            raise OSError(*value)
        assert kind == "done", value
        return value

    def kill(self) -> None:
        """End it by SIGKILL: its connection breaks, and it closes nothing."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End it, whatever it waits for."""
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


class _Whole:
    """A raw pipe as pickle reads it: all that was asked for."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe

    def read(self, size_bytes: int) -> bytes:
        parts = []
        while size_bytes and (part := self._pipe.read(size_bytes)):
            parts.append(part)
            size_bytes -= len(part)
        return b"".join(parts)

    def readline(self) -> bytes:
        line = b""
        while not line.endswith(b"\n") and (part := self._pipe.read(1)):
            line += part
        return line


def serve(kind: type[Nfs], version: str, export: str, name: str, retries: str) -> None:
    """Be the process: answer calls until nobody asks any more."""
    out = sys.stdout.buffer

    def say(kind: str, value: Value) -> None:
        pickle.dump((kind, value), out)
        out.flush()

    try:
        nfs = kind(int(version), export, name, retries=int(retries))
    except OSError as error:
        say("failed", (error.errno, error.strerror))
        return
    say("done", None)
    while True:
        try:
            called, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            say("done", getattr(nfs, called)(*arguments))
        except OSError as error:
            say("failed", (error.errno or errno.EIO, error.strerror))
        except Exception as error:
            say("broken", repr(error))


if __name__ == "__main__":
    serve(Nfs, *sys.argv[1:])
