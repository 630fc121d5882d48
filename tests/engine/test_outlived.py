"""A pool whose file system outlived its server, since a client still has a file of it open."""

import contextlib
import errno
import fcntl
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvfs.core.errors import SourceBusy
from kvfs.devices import (
    Device,
    destroy_source,
    open_pool,
    open_source,
    released,
    wait_released,
    xfs,
)
from kvfs.devices.busy import Outlived, outlived
from kvfs.devices.xfs import LeftMeanwhile
from tests.support.devices.loop import loops_over
from tests.support.devices.pools import Source, blank_source, format_source, refused

pytestmark = pytest.mark.needs_loop

NAME = "extents/07/file"


@pytest.fixture(params=["block", "image"])
def source(request: pytest.FixtureRequest) -> Iterator[Source]:
    """A pool."""
    with blank_source(request.param) as source:
        format_source(source.path)
        yield source


@contextlib.contextmanager
def client_of(source: Source) -> Iterator[int]:
    """Let a server store a file and go, and yield a client's descriptor of it."""
    with open_source(source.path) as device:
        fd = os.open(NAME, os.O_CREAT | os.O_RDWR, 0o600, dir_fd=device.pool_fd)
        os.write(fd, b"stored")
    try:
        yield fd
    finally:
        os.close(fd)


def drive_of(source: Source) -> str:
    """Return the loop device that the bytes of *source* pass through."""
    (path,) = loops_over(source.bytes_at)
    return path


def test_the_next_server_finds_all_of_it_there(source: Source) -> None:
    """Whoever it is joins the file system, with what was never synced; one at a time."""
    with client_of(source) as fd:
        with refused(SourceBusy, source.path):
            wait_released(source.path, wait_s=0.02)
        wait_released(source.path, wait_s=0.0, joins=True)  # who mounts it need not wait
        with open_source(source.path) as device:
            path = Path(f"/proc/self/fd/{device.pool_fd}") / NAME
            assert path.read_bytes() == b"stored"
            assert os.path.samestat(os.fstat(fd), path.stat())
            path.unlink()
            assert os.pread(fd, 10, 0) == b"stored"
            with refused(SourceBusy, source.path, "mounted already"):
                open_source(source.path)
    wait_released(source.path)
    with open_source(source.path) as device:
        assert not (Path(f"/proc/self/fd/{device.pool_fd}") / NAME).exists()


def test_who_joins_for_a_look_writes_nothing(source: Source) -> None:
    with client_of(source), open_source(source.path, read_only=True) as device:
        with pytest.raises(OSError, match="Read-only") as failure:
            os.open(NAME, os.O_WRONLY, dir_fd=device.pool_fd)
        assert failure.value.errno == errno.EROFS
        with refused(SourceBusy, source.path):
            open_source(source.path)


def test_it_is_neither_formatted_nor_destroyed(source: Source) -> None:
    with client_of(source):
        with refused(SourceBusy, source.path):
            format_source(source.path, force=True)
        with refused(SourceBusy, source.path):
            destroy_source(source.path)
    destroy_source(source.path)


def test_one_that_went_meanwhile_is_not_believed_to_have_lived_on(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that nobody looked at may be dirty."""
    with client_of(source):
        with monkeypatch.context() as patch:
            patch.setattr(Outlived, "is_gone", lambda _: True)
            with refused(SourceBusy, source.path, "try again"):
                open_source(source.path)
        open_source(source.path).close()
    wait_released(source.path)


def test_a_pool_in_the_making_is_not_joined(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file system looks as one that outlived its server; POOL is written last."""
    with client_of(source), monkeypatch.context() as patch:
        patch.setattr(xfs, "read_header", lambda *_: None)
        with refused(SourceBusy, source.path, "try again"):
            open_source(source.path)


def test_a_found_one_tells_when_it_went(source: Source) -> None:
    with contextlib.ExitStack() as stack:
        with client_of(source):
            found = stack.enter_context(outlived(drive_of(source)))
            assert found is not None
            assert not found.is_gone()
        assert found.is_gone()


def test_what_somebody_mounted_is_not_joined(source: Source, tmp_path: Path) -> None:
    with client_of(source):
        subprocess.run(["mount", drive_of(source), tmp_path], check=True)
        try:
            with refused(SourceBusy, source.path):
                open_source(source.path)
        finally:
            subprocess.run(["umount", tmp_path], check=True)
        open_source(source.path).close()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """The pauses between looks at an image that is in use, with a clock that they alone turn."""
    made: list[float] = []

    def refuse(_path: str) -> None:
        raise SourceBusy("in use")

    clock = SimpleNamespace(monotonic=lambda: sum(made), sleep=made.append)
    monkeypatch.setattr(released, "time", clock)
    monkeypatch.setattr(released, "_REFUSE_BUSY", {"image": refuse})
    monkeypatch.setattr(released, "recognise", lambda _: "image")
    return made


def test_whoever_waits_looks_more_rarely_but_not_ever_more(pauses: list[float]) -> None:
    with pytest.raises(SourceBusy):
        wait_released("image", wait_s=5.0)
    assert pauses == sorted(pauses)
    assert max(pauses) == 0.1


def test_who_finds_it_left_meanwhile_tries_so_many_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tries: list[str] = []

    def left(path: str, **_: object) -> Device:
        tries.append(path)
        raise LeftMeanwhile(path)

    monkeypatch.setattr(open_pool, "_OPENS", {"image": left})
    monkeypatch.setattr(open_pool, "wait_released", lambda *_, **__: None)
    image = tmp_path / "image"
    image.write_bytes(bytes(4096))
    with pytest.raises(SourceBusy, match="in use until just now"):
        open_source(str(image))
    assert len(tries) == 3


def test_an_image_that_a_dead_server_still_keeps_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its loop device has lost the file system, and has the file open for a moment yet."""
    with blank_source("image") as source:
        format_source(source.path)
        reading, writing = os.pipe()
        taker = os.fork()
        if not taker:  # takes the lock, leaves the file to a child of its own, and is gone
            fd = os.open(source.path, os.O_RDWR)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if not os.fork():
                os.close(writing)
                os.read(reading, 1)  # until the other end is closed
            os._exit(0)
        os.close(reading)
        os.waitpid(taker, 0)
        waits: list[float] = []

        def sleep(wait_s: float) -> None:
            if not waits:
                os.close(writing)  # now the keeper lets go
                with open(source.path, "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX)
            waits.append(wait_s)

        monkeypatch.setattr(
            released, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
        )
        open_source(source.path).close()
        assert waits
