"""Hints are sent to whoever listens, and nobody waits for one who does not."""

import contextlib
import json
import resource
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from kvfs.bridges.hint_sender import RETRY_S, WAITING_MAX_BYTES, WAITING_MAX_S, HintSender
from kvfs.client.control_socket import LINE_MAX_BYTES
from tests.support.clients.stepping import until

#: A call that waits for a server would take longer, by far.
AT_ONCE_S: Final = 1.0


class Clock:
    """A time that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Later:
    """What the sender wants to be called later: at most one call."""

    def __init__(self) -> None:
        self._call: Callable[[], None] | None = None

    def __call__(self, wait_s: float, call: Callable[[], None]) -> None:
        assert self._call is None
        self._call = call

    def run(self) -> None:
        """Let the time pass."""
        call, self._call = self._call, None
        if call is not None:
            call()


class Server:
    """Listens, and reads when it is told to."""

    def __init__(self, path: Path) -> None:
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen()
        self._path = path
        self._connection: socket.socket | None = None
        self._half = b""

    def names(self) -> list[str]:
        """The names in the whole lines that are there."""
        if self._connection is None:
            self._connection, _ = self._listening.accept()
        self._connection.setblocking(False)
        received = self._half
        with contextlib.suppress(BlockingIOError):
            while part := self._connection.recv(1 << 20):
                received += part
        *lines, self._half = received.split(b"\n")
        assert all(len(line) <= LINE_MAX_BYTES for line in lines)
        hints = [hint for line in lines for hint in json.loads(line)["hints"]]
        return [name for hint in hints for name in hint["names"]]

    def end(self) -> None:
        """Hang up, and be gone."""
        if self._connection is not None:
            self._connection.close()
        self._listening.close()
        self._path.unlink()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv.hints"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def later() -> Later:
    return Later()


@pytest.fixture
def sender(path: Path, clock: Clock, later: Later) -> Iterator[HintSender]:
    sender = HintSender(str(path), clock, later)
    yield sender
    sender.close()


@pytest.fixture
def server(path: Path) -> Iterator[Server]:
    server = Server(path)
    yield server
    server.end()


def retain(*names: str) -> list[dict[str, Any]]:
    return [{"do": "retain", "names": list(names)}]


def counted(sender: HintSender) -> tuple[int, int, int]:
    counts = sender.counts
    return counts.sent, counts.dropped, counts.connections


def test_hints_arrive_in_order_and_in_lines_that_the_server_takes(
    server: Server, sender: HintSender, later: Later
) -> None:
    names = [f"/{number:0100}" for number in range(3000)]
    sender.send(retain(*names))
    sender.send(retain("/last"))
    got: list[str] = []
    while len(got) < 3001:
        got += server.names()
        later.run()
    assert got == [*names, "/last"]
    assert counted(sender) == (3001, 0, 1)


def test_without_a_server_hints_are_dropped_after_a_while(
    sender: HintSender, clock: Clock, later: Later, path: Path
) -> None:
    sender.send(retain("/a"))
    clock.now_s += WAITING_MAX_S
    sender.send(retain("/b"))
    assert counted(sender) == (0, 0, 0)
    clock.now_s += 0.5
    later.run()
    assert counted(sender) == (0, 1, 0)
    server = Server(path)
    clock.now_s += RETRY_S
    later.run()
    assert server.names() == ["/b"]
    server.end()


def test_one_attempt_a_while(sender: HintSender, clock: Clock, later: Later, path: Path) -> None:
    sender.send(retain("/a"))
    server = Server(path)
    sender.send(retain("/b"))
    assert counted(sender) == (0, 0, 0)
    clock.now_s += RETRY_S
    later.run()
    assert server.names() == ["/a", "/b"]
    server.end()


def test_a_server_that_restarts_is_found_again(
    sender: HintSender, clock: Clock, path: Path
) -> None:
    first = Server(path)
    sender.send(retain("/a"))
    assert first.names() == ["/a"]
    first.end()
    second = Server(path)
    clock.now_s += RETRY_S
    sender.send(retain("/b"))
    assert second.names() == ["/b"]
    assert counted(sender) == (2, 0, 2)
    second.end()


def test_a_server_that_does_not_read_holds_up_nobody(
    server: Server, sender: HintSender, later: Later
) -> None:
    """The oldest go. What was sent half is never followed by something else."""
    name = "/" + "n" * 1000
    began_s = time.monotonic()
    rounds = 3 * WAITING_MAX_BYTES // (50 * len(name))
    for number in range(rounds):
        sender.send(retain(*[f"{name}{number}"] * 50))
    assert time.monotonic() - began_s < 20 * AT_ONCE_S
    assert sender.counts.dropped > rounds * 50 // 2
    got = 0
    while sum(counted(sender)[:2]) < rounds * 50:
        got += len(server.names())
        later.run()
    sent, dropped, connections = counted(sender)
    assert (sent + dropped, connections) == (rounds * 50, 1)
    assert got + len(server.names()) == sent


def test_a_full_backlog_is_no_server(path: Path, clock: Clock) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(0)
        senders = [HintSender(str(path), clock, Later()) for _ in range(4)]
        began_s = time.monotonic()
        for sender in senders:
            sender.send(retain("/a"))
        assert time.monotonic() - began_s < AT_ONCE_S
        assert [sender.counts.connections for sender in senders][-1] == 0
        for sender in senders:
            sender.close()
        assert senders[-1].counts.dropped == 1


def test_a_name_that_fits_into_no_line_is_left_out(server: Server, sender: HintSender) -> None:
    sender.send(retain("/" + "n" * LINE_MAX_BYTES, "/a"))
    assert server.names() == ["/a"]


def test_what_waits_is_sent_without_a_further_call(path: Path) -> None:
    sender = HintSender(str(path))
    sender.send(retain("/a"))
    server = Server(path)
    until(lambda: sender.counts.sent == 1, "it is sent")
    assert server.names() == ["/a"]
    sender.close()
    server.end()


def test_without_a_free_descriptor_hints_wait(
    server: Server, sender: HintSender, clock: Clock, later: Later
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        sender.send(retain("/a"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert counted(sender) == (0, 0, 0)
    clock.now_s += RETRY_S
    later.run()
    assert server.names() == ["/a"]


def test_without_a_free_thread_the_next_call_sends(path: Path, clock: Clock) -> None:
    def no_thread(_wait_s: float, _call: object) -> None:
        raise RuntimeError("can't start new thread")

    sender = HintSender(str(path), clock, no_thread)
    sender.send(retain("/a"))
    server = Server(path)
    clock.now_s += RETRY_S
    sender.send(retain("/b"))
    assert server.names() == ["/a", "/b"]
    sender.close()
    server.end()
