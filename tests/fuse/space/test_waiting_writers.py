"""Writers that wait for room while others read all that may go: nobody else waits with them."""

import contextlib
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuse.conftest import REFERENCE, pool_source, require_passthrough
from tests.support.mounts.mounting import Mounted, skip_without_mounts, workplace

MIB = 1 << 20
BLOCKS = 62
#: What the server answers late at a time, and pyfuse3's tasks.
LATE_MAX = 256
#: Some find room: what is kept free ahead of writers.
WRITERS = 350
WRITE_BYTES = 64 << 10
#: Longer than this test may take: who is refused was refused for good.
WAIT_S = 60


@pytest.fixture(params=["daemon", "passthrough"])
def small(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A mount of a pool that a few blocks fill."""
    if REFERENCE:
        pytest.skip("a native file system evicts nothing")
    skip_without_mounts()
    flags = (f"--data-path={request.param}", "--capacity=64M", f"--set=room_wait_s={WAIT_S}")
    with (
        workplace("disk") as directory,
        pool_source("tmpfs") as source,
        Mounted(source, directory / "kv", *flags) as mount,
    ):
        if request.param == "passthrough":
            require_passthrough(mount)
        yield mount


def readers_of_all(directory: Path) -> list[int]:
    """Fill the pool with blocks and open each; return the descriptors."""
    fds = []
    for number in range(BLOCKS):
        draft = directory / f"{number}.tmp"
        draft.write_bytes(bytes(MIB))
        # Before it has its name: by then all others are open, and it would be the next to go.
        fds.append(os.open(draft, os.O_RDONLY))
        draft.rename(directory / f"{number}")
    return fds


class Writer(threading.Thread):
    """Creates a file and writes it, and tells when it did the first and how the second ended."""

    def __init__(self, path: Path, created: "queue.SimpleQueue[Exception | None]") -> None:
        super().__init__(daemon=True)
        self._path, self._created = path, created
        self.ended: Exception | str | None = "not yet"

    def run(self) -> None:
        """Do it."""
        try:
            fd = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except OSError as error:
            self._created.put(error)
            return
        self._created.put(None)
        try:
            os.write(fd, bytes(WRITE_BYTES))
            os.close(fd)
            self.ended = None
        except OSError as error:
            self.ended = error


def test_hundreds_that_wait_for_room_keep_nobody_else_waiting(small: Mounted) -> None:
    """[capacity] Creates and lookups go on in their directory, and the closes that make room."""
    directory = small.path / "d"
    directory.mkdir()
    readers = readers_of_all(directory)
    created: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    writers = [Writer(directory / f"new{number}", created) for number in range(WRITERS)]
    try:
        for writer in writers:
            writer.start()
        assert [created.get(timeout=WAIT_S / 2) for _ in writers] == [None] * WRITERS
        with pytest.raises(FileNotFoundError):
            os.stat(directory / "missing")
        assert sum(writer.ended == "not yet" for writer in writers) > LATE_MAX
    finally:
        for fd in readers:
            with contextlib.suppress(OSError):
                os.close(fd)
    for writer in writers:
        writer.join(WAIT_S)
    assert [writer.ended for writer in writers] == [None] * WRITERS
    assert (directory / "new0").read_bytes() == bytes(WRITE_BYTES)
    assert not small.errors()
