"""LMCache's multi-process mode as docs/connectors/lmcache.md tells it: the server, its client.

Both command lines are the document's, and what it says of what they print is what they print.
`lmcache bench server --mode cpu` takes a block the whole way, from an engine's memory through the
server's into L2 and back, and compares checksums. It wants no GPU and no vLLM.
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar, Final

import pytest

from tests.connectors.connector import environment, run
from tests.connectors.document import example
from tests.support.mounts.mounting import Mounted, Reference
from tests.support.rules.documented import of

pytestmark = pytest.mark.connectors

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
    python: Path, directory: Path, document: str = "docs/connectors/lmcache.md"
) -> Iterator[list[str]]:
    """Run the document's `lmcache server` with its L2 in ``directory``; yield flags for clients.

    The machine's own: ports, the directory, and less memory.
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
        [str(python), "-m", "lmcache.cli.main", "server", *flags],
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


def client(python: Path, flags: list[str]) -> str:
    """Run the document's client; what it prints."""
    words = shlex.split(example("lmcache bench server"))[1:]
    return run(python, ["-m", "lmcache.cli.main", *words, *flags])


def test_readmes_server_serves(connectors_python: Path, tmp_path: Path) -> None:
    """As it stands there: a flag that the pinned version wants and it lacks ends it at once."""
    with server(connectors_python, tmp_path / "l2", "README.md"):
        assert (tmp_path / "l2").is_dir()


class TestServer:
    """One mount, on which everything is restarted."""

    data_path: ClassVar[str] = "auto"

    def test_blocks_survive_the_server_and_the_mount(
        self, connectors_python: Path, mount: Mounted | Reference, kv_dir: Path
    ) -> None:
        """Stored and checked by LMCache itself; after both restarted all of it is there."""
        blocks = kv_dir / "lmcache"  # LMCache makes it
        with server(connectors_python, blocks) as flags:
            printed = client(connectors_python, flags)
        assert printed.count("CHECKSUM MATCH OK") == REQUESTS, printed
        sizes = [path.stat().st_size for path in blocks.iterdir()]
        assert sizes == [CHUNK_BYTES] * (REQUESTS * CHUNKS_EACH)
        mount.remount()
        with server(connectors_python, blocks) as flags:
            again = client(connectors_python, flags)
        hits = re.findall(r"seq \d+/cold\] LOOKUP: (\d+)/(\d+) chunks hit", again)
        assert hits == [(str(CHUNKS_EACH), str(CHUNKS_EACH))] * REQUESTS, again
        checksums = r"seq (\d+)/warm\] CHECKSUM: ([0-9a-f]+)"
        assert re.findall(checksums, again) == re.findall(checksums, printed)
        assert re.findall(checksums, again)
