"""Scrapes by clients of every kind: bounded, and never in each other's way. Without a mount."""

import functools
import os
import socket
import threading
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from prometheus_client.parser import text_string_to_metric_families

from kvfs.core.settings import Settings
from mount.control.metrics import scrapes
from mount.control.metrics.exposition import KEPT_S, Exposition
from mount.control.metrics.scrapes import (
    REQUEST_MAX_BYTES,
    SCRAPES_MAX,
    Scrapes,
    serve_scrapes,
    write_textfile,
)
from mount.control.socket import listen, serve_connections
from mount.control.status import describe_lost
from tests.support.clients.stepping import until
from tests.support.rules.metric_document import exchanged

GET = "GET /metrics HTTP/1.1\r\n\r\n"
PATIENCE_S = 30.0


class Asked:
    """A status that counts how often it was asked."""

    count = 0

    async def status(self) -> dict[str, Any]:
        self.count += 1
        return describe_lost(Settings(mountpoint=f"/kv{self.count}", source="/dev/x"), "EIO")


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
async def path(tmp_path: Path, asked: Asked) -> AsyncIterator[str]:
    """A socket at which scrapes are answered, each within a second."""
    path = str(tmp_path / "run" / "kv.metrics")
    scrapes = Scrapes(Exposition(asked.status))
    serve = functools.partial(serve_connections, most=SCRAPES_MAX, deadline_s=1.0)
    async with trio.open_nursery() as nursery:
        with listen(path, 0o666) as listening:
            nursery.start_soon(serve, listening, scrapes.answer)
            yield path
            nursery.cancel_scope.cancel()


async def exchange(path: str, request: str) -> tuple[str, str]:
    with trio.fail_after(PATIENCE_S):
        return await trio.to_thread.run_sync(exchanged, path, request)


async def test_a_lost_device_has_its_metrics(path: str) -> None:
    _, body = await exchange(path, GET)
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }
    assert values == {
        "kvfs_mount_info": 1.0,
        "kvfs_read_only": 0.0,
        "kvfs_little_evictable": 0.0,
        "kvfs_device_lost": 1.0,
        "kvfs_device_silent": 0.0,
    }


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ("HEAD /metrics HTTP/1.1\r\n\r\n", 200),
        ("GET /metrics?name=x HTTP/1.0\r\nHost: x\r\n\r\n", 200),
        ("GET / HTTP/1.1\r\n\r\n", 404),
        ("POST /metrics HTTP/1.1\r\n\r\n", 405),
        ("\r\n\r\n", 405),
        ("GET /metrics HTTP/1.1\r\nX: " + "x" * REQUEST_MAX_BYTES, 431),
        ("GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text; version=9\r\n\r\n", 200),
    ],
)
async def test_each_request_has_its_answer(path: str, request_: str, status: int) -> None:
    head, body = await exchange(path, request_)
    assert head.startswith(f"HTTP/1.1 {status} ")
    assert "Connection: close" in head
    assert body.endswith("# EOF\n") == ("openmetrics" in request_)


async def test_a_request_that_does_not_come_is_not_waited_for(path: str) -> None:
    for request in ("G", "GET /metrics"):
        async with await trio.open_unix_socket(path) as stream:
            await stream.send_all(request.encode())
            with trio.fail_after(PATIENCE_S):
                assert await stream.receive_some() == b""


async def test_clients_that_say_nothing_keep_nobody_away(path: str) -> None:
    silent = [await trio.open_unix_socket(path) for _ in range(3 * SCRAPES_MAX)]
    head, _ = await exchange(path, GET)
    assert head.startswith("HTTP/1.1 200 ")
    for stream in silent:
        await stream.aclose()


async def test_so_many_connections_are_open_at_once(tmp_path: Path, asked: Asked) -> None:
    """The oldest ends for the next one."""
    path = str(tmp_path / "kv.metrics")
    serve = functools.partial(serve_connections, most=2, deadline_s=PATIENCE_S)
    with listen(path) as listening:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, listening, Scrapes(Exposition(asked.status)).answer)
            opened = [await trio.open_unix_socket(path) for _ in range(3)]
            with trio.fail_after(PATIENCE_S / 3):
                assert await opened[0].receive_some() == b""
            await opened[1].send_all(GET.encode())
            assert (await opened[1].receive_some()).startswith(b"HTTP/1.1 200 ")
            for stream in opened:
                await stream.aclose()
            nursery.cancel_scope.cancel()


async def test_a_client_that_reads_nothing_is_cut_off(path: str, asked: Asked) -> None:
    """Its answer is larger than what the socket holds."""

    async def large() -> dict[str, Any]:
        status = await asked.status()
        return {**status, "requests": {f"OP_{number}": 1 for number in range(20_000)}}

    exposition = Exposition(large)
    with listen(f"{path}.large") as listening:
        async with trio.open_nursery() as nursery:
            scrapes, cut = Scrapes(exposition), trio.Event()

            async def answer(stream: trio.SocketStream) -> None:
                try:
                    await scrapes.answer(stream)
                finally:
                    cut.set()

            serve = functools.partial(serve_connections, most=1, deadline_s=0.2)
            nursery.start_soon(serve, listening, answer)
            async with await trio.open_unix_socket(f"{path}.large") as stream:
                stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                await stream.send_all(GET.encode())
                size_bytes = len((await exposition.text())[0])
                with trio.fail_after(PATIENCE_S):
                    await cut.wait()
                    received = b"".join([part async for part in stream])
            assert len(received) < size_bytes
            nursery.cancel_scope.cancel()


async def test_many_scrapers_cost_as_much_as_one(
    asked: Asked, autojump_clock: trio.testing.MockClock
) -> None:
    exposition = Exposition(asked.status)
    texts = {(await exposition.text(accept))[0] for accept in ("", "", "text/plain")}
    assert len(texts) == asked.count == 1
    await trio.sleep(KEPT_S)
    assert (await exposition.text())[0] not in texts
    assert asked.count == 2


async def test_the_file_is_whole_at_every_moment(tmp_path: Path, asked: Asked) -> None:
    textfile = tmp_path / "kvfs.prom"
    settings = Settings(metrics_textfile=str(textfile), metrics_textfile_s=0.001)
    exposition = Exposition(asked.status, now_s=functools.partial(next, count(0, KEPT_S)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(write_textfile, settings, exposition)
        seen = set()
        with trio.fail_after(PATIENCE_S):
            while len(seen) < 20:
                if textfile.exists():
                    text = textfile.read_text()
                    assert text.endswith("\n")
                    assert text.count("# TYPE") == 5
                    seen.add(text)
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert os.listdir(tmp_path) == []


async def test_a_place_that_refuses_the_file_does_not_end_the_mount(
    tmp_path: Path, asked: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    textfile = tmp_path / "no" / "kvfs.prom"
    settings = Settings(metrics_textfile=str(textfile), metrics_textfile_s=0.01)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(write_textfile, settings, Exposition(asked.status))
        wait = functools.partial(until, wait_s=PATIENCE_S)
        await trio.to_thread.run_sync(
            wait, lambda: caplog.text.count("metrics not written") > 1, "it is tried again"
        )
        textfile.parent.mkdir()
        await trio.to_thread.run_sync(wait, textfile.exists, "the file is written")
        nursery.cancel_scope.cancel()


async def test_so_many_scrape_a_mount_at_once(
    tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "kv.metrics")
    monkeypatch.setattr("mount.control.metrics.scrapes.metrics_path", lambda _: path)
    monkeypatch.setattr("mount.control.metrics.scrapes.DEADLINE_S", 1e9)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_scrapes, Settings(), Exposition(asked.status), None)
        await trio.testing.wait_all_tasks_blocked()
        opened = [await trio.open_unix_socket(path) for _ in range(SCRAPES_MAX + 1)]
        with trio.fail_after(PATIENCE_S):
            assert await opened[0].receive_some() == b""
        for stream in opened:
            await stream.aclose()
        nursery.cancel_scope.cancel()


async def test_a_stop_does_not_wait_for_a_file_system_that_hangs(
    tmp_path: Path,
    asked: Asked,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
) -> None:
    may_go_on = threading.Event()
    monkeypatch.setattr(scrapes._Textfile, "remove", lambda _: may_go_on.wait(PATIENCE_S))
    settings = Settings(metrics_textfile=str(tmp_path / "kv.prom"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(write_textfile, settings, Exposition(asked.status))
        await trio.testing.wait_all_tasks_blocked()
        began_s = trio.current_time()
        nursery.cancel_scope.cancel()
    may_go_on.set()
    assert trio.current_time() - began_s < 10
