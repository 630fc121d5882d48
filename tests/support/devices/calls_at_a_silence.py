"""Calls of every kind, made all the while on a mount whose device may not answer."""

import contextlib
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Final

DATA: Final = b"w" * 200_000
#: Between two calls of a kind.
_PAUSE_S: Final = 0.02
_DIRECTORIES: Final = ("loaded", "changed", "stored")
#: Blocks in each of the directories.
BLOCKS: Final = 5

#: Makes a call of one kind; each has another number.
Call = Callable[[int], object]


def store(directory: Path, name: str) -> None:
    """Store one block, as connectors do."""
    (directory / f"{name}.tmp").write_bytes(DATA)
    os.rename(directory / f"{name}.tmp", directory / name)


def prepare(kv: Path) -> None:
    """Make the blocks on which the calls are made."""
    for directory in _DIRECTORIES:
        (kv / directory).mkdir()
        for number in range(BLOCKS):
            store(kv / directory, f"{number}")
    store(kv / "changed", "r0")


class Calls:
    """Calls of one kind, one after the other in a thread, until it ends."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._ends = threading.Event()
        #: How long each took, in seconds.
        self.took_s: list[float] = []
        self.errors: set[int] = set()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    @property
    def done(self) -> int:
        """How many have ended."""
        return len(self.took_s)

    @property
    def longest_s(self) -> float:
        """How long the longest took."""
        return max(self.took_s, default=0.0)

    @property
    def p99_s(self) -> float:
        """What 99 of 100 did not exceed."""
        return statistics.quantiles(self.took_s, n=100)[-1] if self.done > 1 else self.longest_s

    def _work(self) -> None:
        for number in count():
            begun_s = time.monotonic()
            try:
                self._call(number)
            except OSError as error:
                self.errors.add(error.errno or 0)
            self.took_s.append(time.monotonic() - begun_s)
            if self._ends.wait(_PAUSE_S):
                return

    def end(self) -> None:
        """Make no further call; return when the last one has ended."""
        self._ends.set()
        self._thread.join()


@contextlib.contextmanager
def calling(*kinds: dict[str, Call]) -> Iterator[list[dict[str, Calls]]]:
    """Make calls of all *kinds* inside the ``with``; those under way at its end are waited for."""
    made = [{name: Calls(call) for name, call in some.items()} for some in kinds]
    try:
        yield made
    finally:
        for some in made:
            for calls in some.values():
                calls.end()


def calls_without_device(kv: Path) -> dict[str, Call]:
    """Return a call of each kind that needs no device, in directories where nothing is stored."""
    loaded, changed = kv / "loaded", kv / "changed"
    return {
        "stat": lambda _: os.stat(loaded / "1"),
        "lookup": lambda _: os.path.exists(loaded / "none"),
        "listing": lambda _: os.listdir(loaded),
        "load": lambda _: (loaded / "0").read_bytes(),
        "statvfs": lambda _: os.statvfs(kv),
        "mkdir": lambda number: os.mkdir(changed / f"made-{time.monotonic_ns()}-{number}"),
        "chmod": lambda _: os.chmod(changed / "1", 0o666),
        "utime": lambda number: os.utime(changed / "2", (number, number)),
        "xattr": lambda number: os.setxattr(changed / "3", "user.note", b"%d" % number),
        "rename": lambda _: _move(changed),
    }


def _move(directory: Path) -> None:
    old, new = ("r0", "r1") if (directory / "r0").exists() else ("r1", "r0")
    os.rename(directory / old, directory / new)


def calls_with_device(kv: Path) -> dict[str, Call]:
    """Return a call of each kind that needs the device, and stores."""
    stored = kv / "stored"
    return {
        "store": lambda number: store(stored, f"new-{number}"),
        "rewrite": lambda _: (stored / "1").write_bytes(DATA),
        "append": lambda _: os.close(os.open(stored / "2", os.O_WRONLY | os.O_APPEND)),
        "truncate": lambda number: os.truncate(stored / "3", 4096 + number),
    }


def load_direct(path: Path) -> bytes:
    """Load a block past the page cache."""
    with mmap.mmap(-1, len(DATA) // mmap.PAGESIZE * mmap.PAGESIZE + mmap.PAGESIZE) as memory:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            return memory[: os.preadv(fd, [memory], 0)]
        finally:
            os.close(fd)


@contextlib.contextmanager
def waits_of_main_thread(server_pid: int) -> Iterator[list[str]]:
    """Yield where the main thread of *server_pid* is found to wait for a device."""
    found: list[str] = []
    ends = threading.Event()
    task = Path(f"/proc/{server_pid}/task/{server_pid}")

    def look() -> None:
        while not ends.wait(0.01):
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            waits_in = (task / "wchan").read_text() if state == "D" else ""
            # Neither a grace period of the kernel nor a file in memory is a device.
            if waits_in and not any(word in waits_in for word in ("rcu", "shmem")):
                found.append(waits_in)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        ends.set()
        thread.join()
