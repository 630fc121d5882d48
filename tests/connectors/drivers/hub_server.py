"""A hub in the caller's process, as far as huggingface_hub's downloads ask it."""

import http.server
import threading
from typing import ClassVar

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    """The hub: it has the files that it was given, by name."""

    files: ClassVar[dict[str, bytes]] = {}
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        """What is said of a file."""
        self.answer(with_bytes=False)

    def do_GET(self) -> None:
        """The file."""
        self.answer(with_bytes=True)

    def answer(self, *, with_bytes: bool) -> None:
        name = self.path.rpartition("/")[2]
        data = self.files.get(name, b"")
        self.send_response(200 if data else 404)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{name}"')
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if with_bytes:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def serve_hub() -> str:
    """Serve it on this machine's own address, until the process ends; return its URL."""
    hub = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{hub.server_port}"
