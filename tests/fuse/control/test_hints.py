"""The hints socket of a live mount: the examples of docs/hints.md, who may, and what it bears."""

import contextlib
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from kvfs.client.control_socket import LINE_MAX_BYTES
from kvfs.core.mount_name import hints_path
from mount.control.hints import CLIENTS_MAX
from tests.fuse.conftest import NOBODY
from tests.support.clients.stepping import until
from tests.support.mounts.mounting import COMMAND_WAIT_S, ROOT, Mounted, skip_without_mounts
from tests.support.mounts.places import blank_place, small_mount

pytestmark = [pytest.mark.needs_fuse, pytest.mark.one_data_path]

BLOCK_BYTES: Final = 1 << 20
#: The examples of the page: each line of JSON in a block of code.
EXAMPLES: Final = re.findall(
    r"^    (\{.+\})$", (ROOT / "docs" / "hints.md").read_text(), re.MULTILINE
)

#: Sends its first argument to the socket at its second, and prints the answer.
SENDER: Final = """
import socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[2])
connection.sendall(sys.argv[1].encode() + b"\\n")
print(connection.makefile().readline())
"""


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    skip_without_mounts()
    with blank_place() as place:
        yield place


@pytest.fixture
def mounted(place: Path) -> Iterator[Mounted]:
    with small_mount(place) as mounted:
        yield mounted
        mounted.stop()
        assert mounted.errors() == []


class Sender:
    """A client that sends hints."""

    def __init__(self, mounted: Mounted) -> None:
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.settimeout(COMMAND_WAIT_S)
        self.connection.connect(hints_path(str(mounted.status()["name"])))
        self._answers = self.connection.makefile("r")

    def __enter__(self) -> "Sender":
        return self

    def __exit__(self, *_: object) -> None:
        self._answers.close()
        self.connection.close()

    def say(self, *hints: dict[str, Any]) -> dict[str, int]:
        """Send *hints*; return what became of them, but for zeros."""
        return self.send(json.dumps({"id": "x", "hints": hints}))

    def send(self, line: str) -> dict[str, int]:
        """Send *line*, which must have an id."""
        self.connection.sendall(line.encode() + b"\n")
        answer = json.loads(self._answers.readline())
        assert answer.pop("id") == json.loads(line)["id"]
        return {key: count for key, count in answer.items() if count}


def store(directory: Path, name: str) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "x.tmp").write_bytes(bytes(BLOCK_BYTES))
    (directory / "x.tmp").rename(directory / name)
    return directory / name


def flood(mounted: Mounted) -> None:
    """Store three times what the pool holds."""
    for number in range(3 * int(mounted.status()["capacity_bytes"]) // BLOCK_BYTES):
        store(mounted.path / "flood", f"{number}")


def test_what_is_retained_outlives_a_flood(mounted: Mounted) -> None:
    kept = [store(mounted.path / "prompt", f"{number}") for number in range(3)]
    plain = store(mounted.path / "rest", "0")
    for path in kept:  # compiled code answers the next open
        path.read_bytes()
    with Sender(mounted) as sender:
        names = [f"/prompt/{path.name}" for path in kept]
        assert sender.say({"do": "retain", "names": names, "priority": 80}) == {"taken": 3}
        flood(mounted)
        assert [path.exists() for path in (*kept, plain)] == [True, True, True, False]
        assert all(len(path.read_bytes()) == BLOCK_BYTES for path in kept)
        hints = mounted.status()["hints"]
        assert (hints["taken"], hints["kept_hits"]) == (3, 3)
        assert sender.say({"do": "demote", "prefixes": ["prompt/"]}) == {"taken": 3}
    flood(mounted)
    assert not any(path.exists() for path in kept)


def test_the_examples_of_the_page_are_taken(mounted: Mounted) -> None:
    for name in ("a.bin", "b.bin", "c.bin"):
        store(mounted.path / "vllm", name)
        store(mounted.path / "chat-7", name)
    assert len(EXAMPLES) >= 5
    with Sender(mounted) as sender:
        for example in EXAMPLES:
            done = sender.send(json.dumps({**json.loads(example), "id": 1}))
            assert done.keys() == {"taken"}, example
    until(lambda: mounted.status()["hints"]["fetched"] == 2, "both are read")


def test_who_may_not_write_may_not_hint(mounted: Mounted) -> None:
    mounted.path.chmod(0o755)
    closed, opened = store(mounted.path / "d", "closed"), store(mounted.path / "d", "opened")
    opened.chmod(0o666)
    line = json.dumps({"id": 1, "hints": [{"do": "retain", "prefixes": ["/d"]}]})
    path = hints_path(str(mounted.status()["name"]))
    as_nobody = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    done = subprocess.run(
        [*as_nobody, sys.executable, "-c", SENDER, line, path],
        check=True,
        capture_output=True,
        timeout=COMMAND_WAIT_S,
    )
    answer = {"id": 1, "taken": 1, "clipped": 0, "unknown": 0, "refused": 1}
    assert json.loads(done.stdout) == answer
    assert closed.exists()


def test_one_client_more_ends_the_oldest(mounted: Mounted) -> None:
    with Sender(mounted) as oldest, contextlib.ExitStack() as stack:
        assert oldest.say({"do": "release", "names": ["none"]}) == {"unknown": 1}
        others = [stack.enter_context(Sender(mounted)) for _ in range(CLIENTS_MAX)]
        assert oldest.connection.recv(1) == b""
        assert others[-1].say({"do": "release", "names": ["none"]}) == {"unknown": 1}


def test_whatever_is_sent_the_mount_serves(mounted: Mounted) -> None:
    with Sender(mounted) as broken, Sender(mounted) as sender:
        broken.connection.sendall(b"\xff\n{}\n[]\n")
        until(lambda: mounted.status()["hints"]["unknown"] == 3, "all three are counted")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            broken.connection.sendall(bytes(100 * LINE_MAX_BYTES))
        assert sender.say({"do": "fetch", "names": ["none"]}) == {"unknown": 1}
