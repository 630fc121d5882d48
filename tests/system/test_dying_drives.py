"""Drives that fail at any moment, one of three at a time, under clients that load and store.

Each time another drive shuts its file system down, and comes back at the next mount. What is on the
others goes on: no call fails, none waits, no byte is wrong. What was on it is gone, and stays so,
also if the server is killed then, as it is every other time.
"""

import contextlib
import errno
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import pytest

from kvfs.core.drives import Numbering
from kvfs.core.source_list import listed
from kvfs.core.types import DriveNo, InodeNo
from tests.fuse.conftest import PATHS, require_passthrough
from tests.fuse.devices.conftest import skip_without_server
from tests.support.clients.at_work import Worker, all_go_on, at_work
from tests.support.clients.stamped import seed_of, stamped
from tests.support.clients.stepping import until
from tests.support.mounts.drives import DRIVES, fail_drive
from tests.support.mounts.mounting import Mounted, workplace

pytestmark = [pytest.mark.proof, pytest.mark.needs_fuse, pytest.mark.needs_loop]

R = TypeVar("R")
IMAGE_BYTES: Final = 500 << 20
#: On each data path.
MOMENTS: Final = int(os.environ.get("KVFS_MOMENTS", "50"))
CLIENTS: Final = 16
#: What a client keeps at a time: the pool has room for all of it, so nothing is evicted.
KEPT_MAX: Final = 30
SIZES_BYTES: Final = (4096, 150_000, 1 << 20)
#: Before a drive fails the clients run for a time up to this.
AT_MOST_S: Final = 1.0
#: After this no call on another drive waits longer than it, nor one on the drive fails with EIO.
KNOWN_S: Final = 1.0
LOST: Final = frozenset({errno.EIO, errno.ENOENT, errno.ESTALE})


class Moment:
    """Which drive fails, and since when it may have."""

    def __init__(self, drive: DriveNo) -> None:
        self.drive = drive
        self.since_s = float("inf")

    def may_fail(self, drive: DriveNo | None) -> bool:
        """Whether a call on *drive* may fail by now; None: one that is not known."""
        now_s = time.monotonic()
        if drive is None:
            return self.since_s <= now_s <= self.since_s + KNOWN_S
        return drive == self.drive and now_s >= self.since_s


class Client(Worker):
    """Stores, loads and removes blocks of its own, and judges each answer."""

    def __init__(self, place: Path, number: int, kept: dict[str, tuple[int, int, DriveNo]]) -> None:
        """*kept*: what it stored before, by name, with seed, size in bytes and drive."""
        super().__init__(f"client-{number}")
        self._place, self._number, self.kept = place, number, kept
        self._random = random.Random(number)
        self.moment = Moment(DriveNo(0))
        self.done = self.lost = 0
        self.longest_s = 0.0

    def work(self) -> None:
        """Store, load or remove a block."""
        self._step()
        self.done += 1

    def _step(self) -> None:
        name = self._random.choice([*self.kept, ""])
        if not name or self._random.random() < 0.3:
            self._store(f"{self._number} {self._random.randrange(KEPT_MAX)}")
        elif self._random.random() < 0.1:
            self._call(self.kept.pop(name)[2], lambda: (self._place / name).unlink())
        else:
            self.load(name)

    def load(self, name: str) -> None:
        """Load a block that was stored: it is whole, or it was on the drive that has failed."""
        seed, size_bytes, drive = self.kept[name]
        data = self._call(drive, (self._place / name).read_bytes)
        if data is None:
            self.kept.pop(name)
            self.lost += 1
        else:
            assert seed_of(data, name, size_bytes) == seed

    def _store(self, name: str) -> None:
        """Store as a connector does; what had the name before is replaced."""
        temporary = self._place / f"{name}.tmp"
        seed, size_bytes = self._random.randrange(1 << 30), self._random.choice(SIZES_BYTES)
        flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY
        fd = self._call(None, lambda: os.open(temporary, flags, 0o600))
        if fd is None:
            return
        drive = Numbering(DRIVES).drive(InodeNo(os.fstat(fd).st_ino))
        data = stamped(name, size_bytes, seed)
        try:
            written = self._call(drive, lambda: os.write(fd, data))
        finally:
            closed = self._call(drive, lambda: close(fd))
        assert written in (None, size_bytes)
        before = self.kept.pop(name, None)
        if written is None or not closed:
            self._call(drive, temporary.unlink)
        elif self._call(drive, lambda: temporary.rename(self._place / name)) is not None:
            self.kept[name] = (seed, size_bytes, drive)
            return
        if before is not None:  # it has its name still, and nothing says that it is right
            with contextlib.suppress(FileNotFoundError):
                (self._place / name).unlink()

    def _call(self, drive: DriveNo | None, call: Callable[[], R]) -> R | None:
        """Return what *call* on *drive* returned; None if it failed as it may."""
        begun_s = time.monotonic()
        try:
            answer = call()
        except OSError as error:
            if error.errno not in LOST or not self.moment.may_fail(drive):
                raise
            answer = None
        if drive != self.moment.drive and begun_s >= self.moment.since_s + KNOWN_S:
            self.longest_s = max(self.longest_s, time.monotonic() - begun_s)
        return answer


def close(fd: int) -> bool:
    """Close *fd*; True. Raises OSError."""
    os.close(fd)
    return True


@contextlib.contextmanager
def mounted(data_path: str) -> Iterator[Mounted]:
    """Yield a mount of three new image files."""
    skip_without_server(data_path)
    with workplace("disk") as place:
        images = [place / f"{number}.img" for number in range(DRIVES)]
        for image in images:
            with image.open("xb") as file:
                file.truncate(IMAGE_BYTES)
        with Mounted(listed(map(str, images)), place / "kv", f"--data-path={data_path}") as made:
            if data_path == "passthrough":
                require_passthrough(made)
            (made.path / "model").mkdir()
            yield made


def run_through(mount: Mounted, clients: list[Client], drive: DriveNo, wait_s: float) -> float:
    """Let *drive* fail after *wait_s* of the work of *clients*; return when (s) it was known."""
    moment = Moment(drive)
    for client in clients:
        client.moment = moment
    with at_work(clients):
        threading.Event().wait(wait_s)
        moment.since_s = time.monotonic()
        fail_drive(mount, drive)
        known_s = time.monotonic() - moment.since_s
        until(lambda: time.monotonic() > moment.since_s + KNOWN_S, "the moment has passed")
        all_go_on(clients, lambda client: client.done, 5)
    return known_s


def lost_of(client: Client, place: Path, drive: DriveNo) -> int:
    """Load what *client* stored; that on *drive* is gone, and forgotten. Return how many."""
    gone = [name for name, (*_, at) in client.kept.items() if at == drive]
    for name in gone:
        assert not (place / name).exists(), name
        client.kept.pop(name)
    client.moment = Moment(drive)
    for name in list(client.kept):
        client.load(name)
    lost, client.lost = client.lost, 0
    return lost + len(gone)


@pytest.mark.parametrize("data_path", PATHS)
def test_a_drive_fails_at_any_moment(data_path: str) -> None:
    chance = random.Random(data_path)
    kept: list[dict[str, tuple[int, int, DriveNo]]] = [{} for _ in range(CLIENTS)]
    known_s: list[float] = []
    longest_s: list[float] = []
    done, lost, kills, failed = 0, 0, 0, [0] * DRIVES
    with mounted(data_path) as mount:
        for number in range(MOMENTS):
            drive = DriveNo(number % DRIVES)
            place = mount.path / "model"
            clients = [Client(place, number, own) for number, own in enumerate(kept)]
            known_s.append(run_through(mount, clients, drive, chance.uniform(0.0, AT_MOST_S)))
            longest_s.append(max(client.longest_s for client in clients))
            failed[drive] += 1
            done += sum(client.done for client in clients)
            if chance.random() < 0.5:
                mount.kill_server()
                mount.follow_server()
                kills += 1
            lost += sum(lost_of(client, place, drive) for client in clients)
            mount.stop()
            mount.start()
            for client in clients:  # the drive is back, and what it has is not believed
                assert lost_of(client, place, drive) == 0
    print(
        json.dumps(
            {
                "data_path": data_path,
                "moments": MOMENTS,
                "drives": failed,
                "kills": kills,
                "clients": CLIENTS,
                "calls": done,
                "blocks_lost": lost,
                "known_s": {"most": round(max(known_s), 3)},
                "longest_wait_s": round(max(longest_s), 3),
            }
        )
    )
    assert max(longest_s) < KNOWN_S
