"""What docs/metrics.md says of each metric, and scrapes to hold against it."""

import re
import socket
import subprocess
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.mounts.mounting import COMMAND_WAIT_S, ROOT

PAGE: Final = ROOT / "docs" / "metrics.md"
_ROW: Final = re.compile(
    r"^\| `(kvfs_\w+)` \| (\w+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE
)


class Documented(NamedTuple):
    """One row of the page."""

    kind: str
    unit: str
    labels: frozenset[str]
    meaning: str


def documented() -> dict[str, Documented]:
    """Return every metric of the page by its name."""
    rows = _ROW.findall(PAGE.read_text())
    found = {
        name: Documented(kind, unit, frozenset(re.findall(r"`(\w+)`", labels)), meaning)
        for name, kind, unit, labels, meaning in rows
    }
    assert len(found) == len(rows), "a metric stands there twice"
    return found


def scraped(path: str, *headers: str, target: str = "/metrics", method: str = "GET") -> str:
    """Return the body of one scrape of the socket *path*; it must be answered with 200."""
    head, body = exchanged(path, "\r\n".join([f"{method} {target} HTTP/1.1", *headers, "", ""]))
    assert head.startswith("HTTP/1.1 200 OK\r\n"), head
    return body


def exchanged(path: str, request: str) -> tuple[str, str]:
    """Send *request* to the socket *path* and return head and body of the answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(COMMAND_WAIT_S)
        connection.connect(path)
        connection.sendall(request.encode())
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, body = received.decode().partition("\r\n\r\n")
    return head, body


def promtool(*arguments: str | Path, given: str = "") -> str:
    """Run Prometheus' own checker, which must find nothing; return what it printed."""
    done = subprocess.run(
        ["promtool", *arguments],
        input=given,
        capture_output=True,
        text=True,
        timeout=COMMAND_WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
