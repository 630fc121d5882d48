"""LMCache's server and its client, by the command lines that the documents show."""

import os
import re
import shlex
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tests.connectors.connector import environment, run
from tests.connectors.document import example
from tests.support.rules.documented import of

START_WAIT_S: Final = 50.0
REQUESTS: Final = 3
CHUNKS_EACH: Final = 4
CHUNK_BYTES: Final = 16 << 20
"""256 tokens of 16 layers with 8 heads of 128, keys and values, two bytes each."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody has just now."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextmanager
def server(
    python: Path,
    directory: Path,
    document: str = "docs/connectors/lmcache.md",
    prefix: Sequence[str] = (),
) -> Iterator[list[str]]:
    """Run the document's `lmcache server` with its L2 in ``directory``; yield flags for clients.

    The machine's own: ports, the directory, and less memory. ``prefix`` is a command that becomes
    it.
    """
    rpc, http, metrics = free_ports(3)
    (said,) = of(document, "lmcache server ")
    said, places = re.subn(r'(?<=")/kv(/lmcache)?(?=")', str(directory), said)
    assert places == said.count("--l1-size-gb 100") == 1
    said = said.replace("--l1-size-gb 100", "--l1-size-gb 1")
    flags = [
        *shlex.split(said)[2:],
        *("--supported-transfer-mode", "auto", "--port", str(rpc)),
        *("--http-port", str(http), "--prometheus-port", str(metrics)),
    ]
    process = subprocess.Popen(
        [*prefix, str(python), "-m", "lmcache.cli.main", "server", *flags],
        env={**environment(python), "PYTHONUNBUFFERED": "1", "LMCACHE_LOG_LEVEL": "INFO"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )
    printed: list[str] = []
    serves = threading.Event()
    reader = threading.Thread(target=read_along, args=(process, printed, serves))
    reader.start()
    try:
        assert serves.wait(START_WAIT_S), "".join(printed[-30:])
        yield ["--rpc-url", f"tcp://localhost:{rpc}", "--url", f"http://localhost:{http}"]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join()


def read_along(process: subprocess.Popen[str], printed: list[str], serves: threading.Event) -> None:
    """Read what the server prints, to its end; tell when it serves."""
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            printed.append(line)
            if "Application startup complete" in line:
                serves.set()


def client(python: Path, flags: list[str], prefix: Sequence[str] = ()) -> str:
    """Run the document's client; what it prints."""
    words = shlex.split(example("lmcache bench server"))[1:]
    return run(python, ["-m", "lmcache.cli.main", *words, *flags], prefix=prefix)
