"""The control socket: private, bounded, and alive whatever a client sends."""

import contextlib
import json
import os
import socket
import stat
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from kvfs.client.control_socket import LINE_MAX_BYTES, ServerGone, ask, peer_pid, socket_paths
from kvfs.core.errors import (
    IndexDamaged,
    NotFound,
    NotMounted,
    NotRoot,
    ServeFailed,
    SourceBusy,
    UsageError,
)
from mount.control.socket import CONNECTIONS_MAX, group_id, listen, peer_of, serve_control
from tests.support.mounts.mounting import workplace

NOBODY = 65534


async def status(args: dict[str, Any]) -> dict[str, Any]:
    return {"args": args, "server_pid": os.getpid()}


async def refuse(_args: dict[str, Any]) -> dict[str, Any]:
    raise IndexDamaged("the index is gone")


async def miss(_args: dict[str, Any]) -> dict[str, Any]:
    raise NotFound("no such name")


async def fail(_args: dict[str, Any]) -> dict[str, Any]:
    raise RuntimeError("a bug")


VERBS = {"status": status, "refuse": refuse, "miss": miss, "fail": fail}


@pytest.fixture
async def path(tmp_path: Path) -> AsyncIterator[str]:
    """A served control socket."""
    path = str(tmp_path / "run" / "kv.sock")
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_control, path, VERBS)
        yield path
        nursery.cancel_scope.cancel()


async def asked(path: str, do: str, **args: object) -> dict[str, Any]:
    """Ask as the command line does; the client is synchronous."""
    return await trio.to_thread.run_sync(lambda: ask(path, do, args))


async def raw(path: str, *sent: bytes) -> list[dict[str, Any]]:
    """Send bytes as they are, close, and return the replies."""
    stream = await trio.open_unix_socket(path)
    async with stream:
        for part in sent:
            await stream.send_all(part)
        await stream.send_eof()
        received = b"".join([part async for part in stream])
    return [json.loads(line) for line in received.splitlines()]


async def test_a_verb_gets_its_arguments_and_answers(path: str) -> None:
    assert await asked(path, "status", depth=2) == {
        "args": {"depth": 2},
        "server_pid": os.getpid(),
    }


async def test_the_socket_is_private_from_its_first_moment(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        listening = listen(str(tmp_path / "kv.sock"))
    finally:
        os.umask(before)
    with listening:
        mode = os.stat(tmp_path / "kv.sock").st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600


async def test_an_error_of_a_verb_keeps_its_kind_and_its_words(path: str) -> None:
    with pytest.raises(IndexDamaged, match="the index is gone"):
        await asked(path, "refuse")
    replies = await raw(path, b'{"v": 1, "do": "miss"}\n')
    assert replies == [{"v": 1, "ok": False, "error": "no such name", "exit_code": 1}]


async def test_a_bug_in_a_verb_is_logged_and_the_server_lives(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ServeFailed, match="see its log"):
        await asked(path, "fail")
    assert "RuntimeError: a bug" in caplog.text
    caplog.clear()
    assert (await asked(path, "status"))["server_pid"] == os.getpid()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"hello", "not a line of JSON"),
        (b"", "not a line of JSON"),
        (b"\xff\xfe", "not a line of JSON"),
        (b"[" * 50_000, "not a line of JSON"),
        (b"[1]", "not a JSON table"),
        (b'{"do": "status"}', "protocol version None is not 1"),
        (b'{"v": 2, "do": "status"}', "protocol version 2 is not 1"),
        (b'{"v": 1, "do": "stop"}', "unknown request 'stop'; known: fail, miss, refuse, status"),
        (b'{"v": 1, "do": ["status"]}', "unknown request"),
        (b'{"v": 1, "do": "status", "args": 3}', "args is not a JSON table"),
    ],
)
async def test_a_malformed_line_is_answered_and_the_connection_goes_on(
    path: str, line: bytes, said: str
) -> None:
    first, second = await raw(path, line + b"\n", b'{"v": 1, "do": "status"}\n')
    assert first["ok"] is False
    assert first["exit_code"] == UsageError.exit_code
    assert said in first["error"]
    assert second["ok"] is True


async def test_an_endless_line_is_refused_before_it_fills_memory(path: str) -> None:
    stream = await trio.open_unix_socket(path)
    async with stream:
        await stream.send_all(b"x" * (LINE_MAX_BYTES + 1))
        reply = await stream.receive_some()
        assert b"too long" in reply
        assert await stream.receive_some() == b""
    assert (await asked(path, "status"))["server_pid"] == os.getpid()


async def test_a_client_that_vanishes_costs_nothing(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(path)
        client.sendall(b'{"v": 1, "do": "status"}\n' * 50)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert (await asked(path, "status"))["server_pid"] == os.getpid()


async def test_connections_are_bounded_and_come_back(path: str) -> None:
    held = [await trio.open_unix_socket(path) for _ in range(CONNECTIONS_MAX)]
    for stream in held:  # each has been accepted once it answers
        await stream.send_all(b'{"v": 1, "do": "status"}\n')
        assert b'"ok":true' in await stream.receive_some()
    with pytest.raises(ServeFailed, match=r"hung up|reset|Broken pipe"):
        await asked(path, "status")
    await held.pop().aclose()
    await trio.testing.wait_all_tasks_blocked()
    assert (await asked(path, "status"))["server_pid"] == os.getpid()
    for stream in held:
        await stream.aclose()


async def test_a_silent_client_is_dropped(
    path: str, autojump_clock: trio.testing.MockClock
) -> None:
    stream, began_s = await trio.open_unix_socket(path), trio.current_time()
    async with stream:
        await stream.send_all(b'{"v": 1')
        assert await stream.receive_some() == b""
    assert 29 < trio.current_time() - began_s < 60


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
async def test_another_user_is_refused_even_where_the_mode_would_let_in() -> None:
    with workplace() as directory:
        path = str(directory / "kv.sock")
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_control, path, VERBS)
            os.seteuid(NOBODY)
            try:
                with pytest.raises(NotRoot, match="run this as root"):
                    ask(path, "status")
            finally:
                os.seteuid(0)
            os.chmod(path, 0o666)
            os.seteuid(NOBODY)  # the socket remembers who connected it
            try:
                client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                client.connect(path)
            finally:
                os.seteuid(0)
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(client))
            async with stream:
                reply = json.loads(await stream.receive_some())
            nursery.cancel_scope.cancel()
    assert reply["exit_code"] == NotRoot.exit_code
    assert "result" not in reply


async def test_the_socket_goes_with_its_server(tmp_path: Path) -> None:
    path = str(tmp_path / "kv.sock")
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_control, path, VERBS)
        nursery.cancel_scope.cancel()
    with pytest.raises(NotMounted, match="does not exist"):
        ask(path, "status")


async def test_a_successor_keeps_its_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "kv.sock")
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_control, path, VERBS)
        os.unlink(path)
        successor = listen(path)
        nursery.cancel_scope.cancel()
    with successor:
        assert peer_pid(path) == os.getpid()


def test_a_dead_servers_socket_is_named_stale_and_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "kv.sock")
    listen(path).close()
    assert socket_paths(str(tmp_path)) == [path]
    with pytest.raises(ServerGone, match="stale: its server is dead"):
        ask(path, "status")
    assert peer_pid(path) == 0
    with listen(path):
        assert peer_pid(path) == os.getpid()


async def test_a_living_servers_socket_is_not_taken(path: str) -> None:
    with pytest.raises(SourceBusy, match="already uses this name"):
        listen(path)
    assert (await asked(path, "status"))["server_pid"] == os.getpid()


def test_a_path_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    path.write_text("precious")
    with pytest.raises(ServeFailed, match="is not a socket"):
        listen(str(path))
    assert path.read_text() == "precious"


def test_a_server_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    path = str(tmp_path / "kv.sock")
    with listen(path), pytest.raises(ServeFailed, match=r"no answer within 0\.05 s"):
        ask(path, "status", timeout_s=0.05)


def test_a_server_that_takes_nobody_any_more_is_given_up_in_time(tmp_path: Path) -> None:
    """A stopped server's connections wait in line, and the line has an end."""
    path = str(tmp_path / "kv.sock")
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(listen(path))
        listening.listen(4)  # a shorter one
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(path)
        with pytest.raises(ServeFailed, match=r"no answer within 0\.1 s"):
            ask(path, "status", timeout_s=0.1)
        assert listening.fileno() >= 0


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (b"nonsense\n", "not JSON"),
        (b'{"v": 9}\n', "another protocol version"),
        (b'{"v": 1, "ok": true}\n', "holds no result"),
        (b'{"v": 1, "ok": false}\n', "gave no reason"),
        (b"", "hung up"),
    ],
)
async def test_a_broken_reply_is_one_line(tmp_path: Path, reply: bytes, said: str) -> None:
    path = str(tmp_path / "kv.sock")

    async def answer(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some()
            await stream.send_all(reply)

    listener = trio.SocketListener(trio.socket.from_stdlib_socket(listen(path)))
    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, answer, [listener])
        with pytest.raises(ServeFailed, match=said):
            await asked(path, "status")
        nursery.cancel_scope.cancel()


def test_no_directory_means_no_sockets(tmp_path: Path) -> None:
    assert socket_paths(str(tmp_path / "none")) == []


def test_who_listens_is_known_however_many_have_asked_in_vain(tmp_path: Path) -> None:
    """A server that hangs takes no connection; `kvfs umount` must know whether it lives."""
    path = str(tmp_path / "run" / "kv.sock")
    with contextlib.closing(listen(path)):
        assert {peer_pid(path) for _ in range(100)} == {os.getpid()}


async def test_members_of_the_group_keep_root_not_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here all are taken for members, until root comes."""
    path, is_root = str(tmp_path / "kv.sock"), False
    monkeypatch.setattr("mount.control.socket._is_owner", lambda _: is_root)
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_control, path, VERBS, os.getgid())
        held = [await trio.open_unix_socket(path) for _ in range(CONNECTIONS_MAX // 2)]
        for stream in held:
            await stream.send_all(b'{"v": 1, "do": "status"}\n')
            assert b'"ok":true' in await stream.receive_some()
        with pytest.raises(ServeFailed, match=r"hung up|reset|Broken pipe"):
            await asked(path, "status")
        is_root = True
        assert (await asked(path, "status"))["server_pid"] == os.getpid()
        for stream in held:
            await stream.aclose()
        nursery.cancel_scope.cancel()


async def test_all_groups_of_a_process_are_known() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        async with stream:
            pid, uid, groups = peer_of(stream)
    assert (pid, uid) == (os.getpid(), os.getuid())
    assert groups == {os.getgid(), *os.getgroups()}


def test_a_group_may_be_given_by_its_number() -> None:
    assert group_id(str((1 << 32) - 2)) == (1 << 32) - 2
    with pytest.raises(UsageError, match="there is no group '4294967295'"):
        group_id(str((1 << 32) - 1))  # which means none to chown(2)
