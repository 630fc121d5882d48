"""A pool of several drives, mounted: all that one mount does, with each block on one of them."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.core.source_list import listed, sources_of
from kvfs.machine.mount_table import kvfs_at
from tests.fuse.conftest import PATHS
from tests.fuse.devices.conftest import mounted_drives
from tests.support.clients.stamped import seed_of
from tests.support.mounts.drives import DRIVES, drives_of, extents_of, store
from tests.support.mounts.mounting import (
    Mounted,
    mounted_at,
    run_kvfs,
    skip_without_mounts,
    workplace,
)

MIB: Final = 1 << 20
#: So much that nothing is evicted; and so little that it is filled soon.
CAPACITY_BYTES: Final = DRIVES * 128 * MIB
SMALL_BYTES: Final = DRIVES * 16 * MIB
CLIENTS: Final = 4
BLOCKS: Final = 40
PIECE: Final = b"x" * 8192


@pytest.fixture(params=PATHS)
def mount(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A mount of a new pool on each data path; in the end its log holds no error."""
    with mounted_drives(request.param, CAPACITY_BYTES) as made:
        yield made


def test_blocks_are_on_all_drives_and_outlive_a_remount(mount: Mounted) -> None:
    (mount.path / "model").mkdir()
    for number in range(BLOCKS):
        store(mount.path / "model", f"{number}", 100_000 + number, 1)
    before = drives_of(mount.path / "model")
    assert min(before) > BLOCKS // DRIVES // 2, "one writer takes the drives in turn"
    assert min(extents_of(mount)) >= 100_000
    present = kvfs_at(str(mount.path))
    assert present is not None
    assert present.source == mount.source == mount.status()["source"]
    mount.stop()
    mount.source = listed(reversed(sources_of(mount.source)))  # their order tells nothing
    mount.start()
    assert drives_of(mount.path / "model") == before
    for number in range(BLOCKS):
        data = (mount.path / "model" / f"{number}").read_bytes()
        assert seed_of(data, f"{number}", 100_000 + number) == 1


def test_a_long_list_of_sources_is_cut_in_the_mount_table() -> None:
    """The kernel takes 255 bytes; the pool is mounted and unmounted all the same."""
    skip_without_mounts()
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(workplace("disk"))
        drives = [
            stack.enter_context(mounted_at(place / f"{at}{'x' * 90}", "-t", "tmpfs", "kvfs-test"))
            for at in range(DRIVES)
        ]
        source = listed(map(str, drives))
        made = stack.enter_context(Mounted(source, place / "kv", f"--capacity={CAPACITY_BYTES}"))
        present = kvfs_at(str(made.path))
        assert present is not None
        assert source.startswith(f"{present.source},")
        assert made.status()["source"] == source
        made.stop()


def test_a_full_pool_never_refuses_a_block(mount: Mounted) -> None:
    """Twelve times what it holds: each drive evicts its own, and what is there is whole."""
    mount.remount(f"--capacity={SMALL_BYTES}")
    size_bytes = MIB
    whole = 12 * SMALL_BYTES // size_bytes
    for number in range(whole):
        store(mount.path, f"{number}", size_bytes, number)
    status = mount.status()
    assert status["capacity_bytes"] == SMALL_BYTES
    assert "ENOSPC" not in status["errors"]
    assert status["used_bytes"] <= SMALL_BYTES
    left = sorted(int(entry.name) for entry in os.scandir(mount.path))
    assert len(left) >= SMALL_BYTES // size_bytes // 2
    assert left[-1] == whole - 1
    for number in left:
        with contextlib.suppress(FileNotFoundError):  # evicted since, for the next writers
            data = (mount.path / f"{number}").read_bytes()
            assert seed_of(data, f"{number}", size_bytes) == number
    assert min(drives_of(mount.path)) > 0
    assert max(extents_of(mount)) <= SMALL_BYTES // DRIVES


class Client(threading.Thread):
    """Loads all blocks and writes a draft, again and again; keeps what went wrong."""

    def __init__(self, path: Path, names: dict[str, int], number: int) -> None:
        super().__init__()
        self._path, self._names = path, names
        self.draft = f"draft-{number}"
        self.ends = threading.Event()
        self.written_bytes = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            with (self._path / self.draft).open("xb", buffering=0) as file:
                while not self.ends.is_set():
                    self.load()
                    file.seek(self.written_bytes % MIB)
                    self.written_bytes = max(self.written_bytes, file.tell() + file.write(PIECE))
        except BaseException as error:  # a failed assertion too; the test raises it
            self.failure = error

    def load(self) -> None:
        """Load each block; all are there and whole."""
        for name, size_bytes in self._names.items():
            assert seed_of((self._path / name).read_bytes(), name, size_bytes) == 1


def test_killed_servers_are_followed_and_nothing_is_lost(mount: Mounted) -> None:
    names = {f"{number}": 50_000 + number for number in range(12)}
    for name, size_bytes in names.items():
        store(mount.path, name, size_bytes, 1)
    clients = [Client(mount.path, names, number) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    try:
        for _ in range(3):
            mount.kill_server()
            mount.follow_server()
            store(mount.path, f"after {mount.server_pid}", 50_000, 1)
    finally:
        for client in clients:
            client.ends.set()
            client.join()
    for client in clients:
        if client.failure is not None:
            raise client.failure
        assert (mount.path / client.draft).read_bytes() == b"x" * client.written_bytes
    assert mount.status()["restarts"] == 3
    before = sorted(os.listdir(mount.path))
    assert len(before) == len(names) + CLIENTS + 3
    mount.remount()
    assert sorted(os.listdir(mount.path)) == before
    clients[0].load()


def test_an_upgrade_hands_on_all_drives(mount: Mounted) -> None:
    for number in range(BLOCKS):
        store(mount.path, f"{number}", 50_000, number)
    run_kvfs("upgrade", str(mount.path))
    mount.adopt()
    before = drives_of(mount.path)
    for number in range(BLOCKS, 2 * BLOCKS):
        store(mount.path, f"{number}", 50_000, number)
    after = drives_of(mount.path)
    assert min(now - then for now, then in zip(after, before, strict=True)) > BLOCKS // DRIVES // 2
    for number in range(2 * BLOCKS):
        assert seed_of((mount.path / f"{number}").read_bytes(), f"{number}", 50_000) == number
    assert mount.status()["upgrades"] == 1


def test_after_all_processes_are_killed_the_pool_mounts_again(mount: Mounted) -> None:
    for number in range(12):
        store(mount.path, f"{number}", 50_000, number)
    mount.kill_daemon()
    mount.start()
    for number in range(12):
        assert seed_of((mount.path / f"{number}").read_bytes(), f"{number}", 50_000) == number
    mount.stop()
    done = run_kvfs("fsck", *sources_of(mount.source))
    assert "12 blocks, 1 directory, no problem" in done.stdout
    mount.start()


def test_status_tells_of_each_drive(mount: Mounted) -> None:
    """What they hold together is what the pool holds."""
    for number in range(BLOCKS):
        store(mount.path, f"{number}", 50_000, number)
    status = mount.status()
    rows = [status["drives"][f"{drive}"] for drive in range(DRIVES)]
    assert [row["source"] for row in rows] == list(sources_of(mount.source))
    assert rows[0]["uuid"] == status["uuid"]
    assert "failed" not in {row["state"] for row in rows}
    assert [row["blocks"] for row in rows] == drives_of(mount.path)
    assert [row["capacity_bytes"] for row in rows] == [CAPACITY_BYTES // DRIVES] * DRIVES
    assert sum(row["blocks"] for row in rows) == status["blocks"] == BLOCKS
    assert [row["used_bytes"] // 53_248 for row in rows] == [row["blocks"] for row in rows]
    shown = run_kvfs("status", str(mount.path)).stdout.splitlines()
    (line,) = [line for line in shown if line.startswith("drives")]
    assert f"0: source {rows[0]['source']}" in line
