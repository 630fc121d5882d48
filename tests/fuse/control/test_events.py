"""The stream of events of a live mount, as docs/events.md says, and its bounds without one."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import trio
import trio.testing

from kvfs.core.errors import NotMounted, NotRoot, UsageError
from kvfs.core.mount_name import events_path
from kvfs.core.settings import Settings
from kvfs.core.types import NAME_MAX_BYTES, PATH_MAX_BYTES, ROOT_INODE, InodeNo
from kvfs.pool.figures.events import WAITING_MAX_BYTES, Events, Kind
from kvfs.storage.index import Index
from mount.control.events import BACKLOG_MAX_BYTES, LISTENERS_MAX, Broadcast, serve_events
from mount.control.socket import listen, serve_connections
from tests.fuse.conftest import NOBODY
from tests.support.clients.callers import Caller
from tests.support.clients.stepping import until
from tests.support.forks.process import Process
from tests.support.mounts.mounting import COMMAND_WAIT_S, KVFS, ROOT, Mounted, run_kvfs
from tests.support.store.deep_index import DeepIndex

pytestmark = pytest.mark.needs_fuse

_ROW: Final = re.compile(r"^\| `(\w+)` \| ([^|]*) ?\| [^|]+ \|$", re.MULTILINE)
PATIENCE_S: Final = 60.0
#: The shortest line of an event.
LINE_BYTES: Final = 64
#: A path of so many levels with such names has 250 KiB.
LEVELS: Final = 1000
DEEP: Final = b"d" * 250
LOOKS: Final = 4000
#: What the server may grow by, whatever somebody names.
GROWTH_MAX_BYTES: Final = 64 << 20


def documented() -> dict[str, set[str]]:
    """The keys of each event on the page."""
    rows = _ROW.findall((ROOT / "docs" / "events.md").read_text())
    return {event: set(re.findall(r"`(\w+)`", keys)) for event, keys in rows}


class Listener:
    """A client that has read the hello."""

    def __init__(self, path: str) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.settimeout(COMMAND_WAIT_S)
        self._connection.connect(path)
        self._lines = self._connection.makefile("r")
        self.hello = self.next()

    def next(self) -> dict[str, Any]:
        """Return the next event, whose keys must be those of the page."""
        told: dict[str, Any] = json.loads(next(self._lines))
        assert told.keys() - {"event"} == documented()[told["event"]]
        return told

    def until(self, event: str, path: str) -> dict[str, Any]:
        """Return the next *event* of *path*."""
        while True:
            told = self.next()
            if (told["event"], told.get("path")) == (event, path):
                return told

    def close(self) -> None:
        self._lines.close()
        self._connection.close()


@pytest.fixture
def listener(mount: Mounted, kv: Path, kvfs_only: None) -> Iterator[Listener]:
    listener = Listener(events_path(str(mount.status()["name"])))
    yield listener
    listener.close()


def test_each_event_is_told(listener: Listener, mount: Mounted, kv: Path) -> None:
    assert listener.hello["mountpoint"] == str(mount.path)
    assert listener.hello["format"] == 1
    top = f"/{kv.name}"
    (kv / "b.tmp").write_bytes(b"x" * 5000)
    (kv / "b.tmp").rename(kv / "b.data")
    stored = listener.until("stored", f"{top}/b.data")
    assert stored["bytes"] == 5000
    (kv / "leased").write_bytes(b"y")
    assert listener.until("stored", f"{top}/leased")["time"] >= stored["time"]
    assert not (kv / "never").exists()
    listener.until("missing", f"{top}/never")
    run_kvfs("evict", str(kv / "b.data"))
    evicted = listener.until("evicted", f"{top}/b.data")
    assert (evicted["bytes"], evicted["reason"]) == (5000, "command")
    (kv / "leased").unlink()
    assert listener.until("removed", f"{top}/leased")["bytes"] == 1


def test_only_blocks_have_events(listener: Listener, kv: Path) -> None:
    (kv / "part.tmp").write_bytes(b"x")
    (kv / "part.tmp").unlink()
    (kv / "directory").mkdir()
    (kv / "directory").rmdir()
    (kv / "link").symlink_to("nowhere")
    (kv / "link").unlink()
    (kv / "end").write_bytes(b"x")
    told = listener.next()
    assert (told["event"], told["path"]) == ("stored", f"/{kv.name}/end")


def deepened(caller: Caller, top: Path) -> int:
    """Make LEVELS directories one below the other; return the caller's descriptor of the last."""
    fd: int = caller.os("open", str(top), os.O_RDONLY)
    for _ in range(LEVELS):
        caller.os("mkdir", DEEP, dir_fd=fd)
        above, fd = fd, caller.os("open", DEEP, os.O_RDONLY, dir_fd=fd)
        caller.os("close", above)
    return fd


def razed(caller: Caller, fd: int) -> None:
    """Remove what ``deepened`` made, of which *fd* is the last."""
    for _ in range(LEVELS):
        above = caller.os("open", "..", os.O_RDONLY, dir_fd=fd)
        caller.os("close", fd)
        caller.os("rmdir", DEEP, dir_fd=above)
        fd = above
    caller.os("close", fd)


def resident_bytes(pid: int) -> int:
    found = re.search(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.one_data_path
def test_a_deep_tree_and_a_listener_that_pauses_take_little_memory(
    listener: Listener, mount: Mounted, kv: Path, nobody: Caller, kvfs_only: None
) -> None:
    """The listener loses what it did not take in time, is told how many, and hears what follows."""
    kv.chmod(0o777)
    fd = deepened(nobody, kv)
    before_bytes = resident_bytes(mount.server_pid)
    missed = int(mount.status()["cache"]["misses"]) + LOOKS
    for number in range(LOOKS):
        with pytest.raises(FileNotFoundError):
            nobody.os("stat", f"{number:0200}", dir_fd=fd)
    until(lambda: int(mount.status()["cache"]["misses"]) >= missed, "they count as misses")
    assert resident_bytes(mount.server_pid) - before_bytes < GROWTH_MAX_BYTES
    razed(nobody, fd)
    (kv / "end").write_bytes(b"x")
    told = [listener.next()]
    while told[-1].get("path") != f"/{kv.name}/end":
        told.append(listener.next())
    # The directories of tests, this one's too, were looked for before they were made.
    missing = [one["path"] for one in told if one["event"] == "missing"]
    deep = [path for path in missing if not path.startswith("/test-")]
    lost = sum(one["count"] for one in told if one["event"] == "lost")
    assert lost > 0
    assert lost + len(deep) == LOOKS
    assert all(path.startswith(".../d") for path in deep)
    assert max(map(len, deep)) < PATH_MAX_BYTES


def test_the_verb_prints_them(mount: Mounted, kv: Path, kvfs_only: None) -> None:
    command = [*KVFS, "events", str(mount.path), "--count", "1"]
    with Process(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as printing:
        assert printing.stdout is not None
        number = 0
        # It listens from some moment on, which it does not tell.
        while printing.poll() is None:
            number += 1
            (kv / f"{number}").write_bytes(b"x")
        line = printing.stdout.read()
    assert json.loads(line)["event"] == "stored"
    assert printing.returncode == 0


def test_the_verb_speaks_vllms_format(mount: Mounted, kv: Path, kvfs_only: None) -> None:
    """A message for each block that vLLM's tier names; its own code reads them in connectors'."""
    command = [*KVFS, "events", str(mount.path), "--format", "vllm", "--count", "2"]
    hashed = "01234" + "ab" * 21 + "c" + "0123456789abcdef"
    block = kv / "model_0a_r0" / hashed[:3] / f"{hashed[3:5]}_g0" / f"{hashed}.bin"
    block.parent.mkdir(parents=True)
    with Process(command, stdout=subprocess.PIPE, cwd=ROOT) as printing:
        assert printing.stdout is not None
        while printing.poll() is None:
            (kv / "config.json").write_bytes(b"x")
            block.write_bytes(b"x")
            block.unlink()
        said = printing.stdout.read()
    assert said.startswith(b"\x92\xcb")
    assert said.count(b"block_hashes\x91\xcf" + bytes.fromhex(hashed[-16:])) == 2
    assert printing.returncode == 0


def test_the_verb_says_what_is_wrong(mount: Mounted, tmp_path: Path, kvfs_only: None) -> None:
    for arguments, error in (
        ((str(tmp_path),), NotMounted),
        ((str(mount.path), "--count=0"), UsageError),
        ((str(mount.path), "--publish=tcp://*:5557"), UsageError),
    ):
        done = run_kvfs("events", *arguments, check=False)
        assert done.returncode == error.exit_code
        assert len(done.stderr.splitlines()) == 1


def test_a_stranger_is_told_which_setting_lets_it_in(mount: Mounted, kvfs_only: None) -> None:
    """Run by the code of the command, since the interpreter of a test may be closed to others."""
    program = (
        "import os, sys; import kvfs.cli.main, kvfs.cli.top, kvfs.client.servers;"
        f"os.setresuid({NOBODY}, {NOBODY}, {NOBODY});"
        f"sys.exit(kvfs.cli.main.main(['events', {str(mount.path)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == NotRoot.exit_code, done.stderr
    assert "events_socket_mode" in done.stderr


# ---- without a mount ----


class NoIndex(Index):
    """An index in which every directory is the root."""

    def __init__(self) -> None:
        pass


@pytest.fixture
def events() -> Events:
    return Events(NoIndex(), lambda: 1_500_000_000)


def note(events: Events, number: int) -> None:
    events.add(Kind.STORED, ROOT_INODE, f"{number}".encode(), bytes=number)


def test_nothing_is_kept_that_nobody_takes(events: Events) -> None:
    events.listen(wanted=True)
    for number in range(20_000):
        note(events, number)
    lines = events.pop(100_000)
    assert len(lines) + events.take_lost() == 20_000
    assert json.loads(lines[-1]) == {
        "event": "stored",
        "time": 1.5,
        "path": "/19999",
        "bytes": 19_999,
    }
    note(events, 1)
    events.listen(wanted=False)
    assert events.pop(1) == []


def test_a_name_of_any_bytes_is_a_line(events: Events) -> None:
    events.add(Kind.MISSING, ROOT_INODE, b'\xff\n"')
    (line,) = events.pop(9)
    assert line.isascii()
    assert line.count(b"\n") == 1
    assert json.loads(line)["path"].encode(errors="surrogateescape") == b'/\xff\n"'


def test_a_path_is_put_together_once_and_no_longer_than_a_call_takes() -> None:
    index, last = DeepIndex(DEEP), InodeNo(LEVELS + 1)
    events = Events(index, lambda: 0)
    events.listen(wanted=True)
    count = WAITING_MAX_BYTES // PATH_MAX_BYTES // 2
    for number in range(count):
        events.add(Kind.MISSING, last, b"%d" % number)
    assert index.reads <= PATH_MAX_BYTES // len(DEEP) + 1
    paths = [json.loads(line)["path"] for line in events.pop(count)]
    assert len(paths) == count
    assert all(len(path) < PATH_MAX_BYTES for path in paths)
    assert paths[7].startswith(".../ddd")
    assert paths[7].endswith("ddd/7")
    events.tree_changed()
    events.add(Kind.MISSING, InodeNo(3), b"name")
    (line,) = events.pop(1)
    assert json.loads(line)["path"] == f"/{DEEP.decode()}/{DEEP.decode()}/name"


def test_who_looks_into_ever_other_deep_directories_loses_events_and_not_time() -> None:
    """Between two calls of ``pop`` only so many rows of the index are read for paths."""
    index = DeepIndex()
    events = Events(index, lambda: 0)
    events.listen(wanted=True)
    for number in range(LOOKS):
        events.add(Kind.MISSING, InodeNo(LEVELS + number), b"name")
    assert index.reads < LOOKS * LEVELS / 100
    assert len(events.pop(LOOKS)) + events.take_lost() == LOOKS
    events.add(Kind.MISSING, InodeNo(LEVELS), b"name")
    assert len(events.pop(LOOKS)) == 1


def test_what_waits_is_bounded_in_bytes(events: Events) -> None:
    events.listen(wanted=True)
    count = 2 * WAITING_MAX_BYTES // NAME_MAX_BYTES
    for number in range(count):
        events.add(Kind.STORED, ROOT_INODE, b"%0255d" % number, bytes=number)
    kept = [json.loads(line)["bytes"] for line in events.pop(count)]
    assert sum(NAME_MAX_BYTES for _ in kept) < WAITING_MAX_BYTES
    assert kept == list(range(count - len(kept), count))
    assert events.take_lost() == count - len(kept)


async def with_broadcast(path: str, events: Events, use: Callable[[Broadcast], Any]) -> None:
    """Serve *events* at *path* while *use* runs."""
    broadcast = Broadcast(Settings(mountpoint="/kv", name="kv"), events)
    with listen(path) as listening:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(broadcast.run)
            nursery.start_soon(
                lambda: serve_connections(
                    listening, broadcast.follow, most=LISTENERS_MAX, deadline_s=float("inf")
                )
            )
            with trio.fail_after(PATIENCE_S):
                await use(broadcast)
            nursery.cancel_scope.cancel()


async def read_until(stream: trio.SocketStream, end: bytes) -> list[dict[str, Any]]:
    """Read lines up to the one that ends so."""
    received = bytearray()
    while not received.endswith(end):
        received += await stream.receive_some(1 << 20)
    return [json.loads(line) for line in received.splitlines()]


async def test_a_slow_reader_is_told_how_many_it_lost(tmp_path: Path, events: Events) -> None:
    """And keeps nobody else from getting all of them."""
    path, step = str(tmp_path / "kv.events"), 8192
    count = 3 * BACKLOG_MAX_BYTES // LINE_BYTES // step * step

    async def use(_: Broadcast) -> None:
        async with (
            await trio.open_unix_socket(path) as slow,
            await trio.open_unix_socket(path) as swift,
        ):
            for stream in (slow, swift):
                assert json.loads(await stream.receive_some(1 << 16))["event"] == "hello"
            for first in range(0, count, step):
                for number in range(first, first + step):
                    note(events, number)
                told = await read_until(swift, b":%d}\n" % number)
                assert [one["bytes"] for one in told] == list(range(first, first + step))
            told = await read_until(slow, b":%d}\n" % number)
            lost = sum(one["count"] for one in told if one["event"] == "lost")
            kept = [one["bytes"] for one in told if one["event"] == "stored"]
            assert lost > 0
            assert lost + len(kept) == count
            assert kept == sorted(kept)

    await with_broadcast(path, events, use)


async def test_nothing_is_noted_once_the_last_client_has_gone(
    tmp_path: Path, events: Events
) -> None:
    path = str(tmp_path / "kv.events")

    async def use(_: Broadcast) -> None:
        assert not events.wanted
        async with await trio.open_unix_socket(path) as stream:
            await stream.receive_some(1 << 16)
            assert events.wanted
        while events.wanted:
            await trio.lowlevel.checkpoint()

    await with_broadcast(path, events, use)


@pytest.fixture
async def follower(
    events: Events,
) -> AsyncIterator[tuple[trio.SocketStream, trio.Event]]:
    """A client of the events, and what says that it was cut off."""
    broadcast, cut_off = Broadcast(Settings(mountpoint="/kv", name="kv"), events), trio.Event()
    ours, theirs = (trio.SocketStream(end) for end in trio.socket.socketpair())

    async def serve() -> None:
        await broadcast.follow(ours)
        cut_off.set()

    async with ours, theirs, trio.open_nursery() as nursery:
        nursery.start_soon(broadcast.run)
        nursery.start_soon(serve)
        await trio.testing.wait_all_tasks_blocked()
        yield theirs, cut_off
        nursery.cancel_scope.cancel()


async def test_where_nothing_happens_a_line_says_so(
    follower: tuple[trio.SocketStream, trio.Event], autojump_clock: trio.testing.MockClock
) -> None:
    stream, _ = follower
    began_s = trio.current_time()
    told = [*await read_until(stream, b"\n"), *await read_until(stream, b"\n")]
    assert [one["event"] for one in told] == ["hello", "quiet"]
    assert 29 < trio.current_time() - began_s < 40


async def test_who_takes_nothing_is_cut_off(
    follower: tuple[trio.SocketStream, trio.Event],
    events: Events,
    autojump_clock: trio.testing.MockClock,
) -> None:
    _, cut_off = follower
    began_s = trio.current_time()
    for number in range(1 << 14):
        note(events, number)
    await cut_off.wait()
    assert 59 < trio.current_time() - began_s < 120


async def test_so_many_listen_at_once(
    tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest ends for the next one."""
    path = str(tmp_path / "kv.events")
    monkeypatch.setattr("mount.control.events.events_path", lambda _: path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_events, Settings(mountpoint="/kv", name="kv"), events, None)
        await trio.testing.wait_all_tasks_blocked()
        opened = [await trio.open_unix_socket(path) for _ in range(LISTENERS_MAX + 1)]
        with trio.fail_after(PATIENCE_S):
            told = b"".join([part async for part in opened[0]])
        assert [json.loads(line)["event"] for line in told.splitlines()] == ["hello"]
        for stream in opened:
            await stream.aclose()
        nursery.cancel_scope.cancel()
