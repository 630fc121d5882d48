"""A mounted pool of three drives, one of whose file systems shuts itself down: servers follow."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, Self

import pytest

from kvfs.core.drives import Numbering
from kvfs.core.source_list import listed
from kvfs.core.types import InodeNo
from tests.fuse.conftest import require_passthrough
from tests.support.clients.stamped import seed_of
from tests.support.clients.stepping import until
from tests.support.mounts.drives import DRIVES, drives_of, fail_drive, names_on, store
from tests.support.mounts.mounting import Mounted, run_kvfs, skip_without_mounts, workplace

pytestmark = [pytest.mark.needs_fuse, pytest.mark.needs_loop]

BLOCKS: Final = 18
SIZE_BYTES: Final = 100_000


@pytest.fixture(params=[0, 1])
def failed(request: pytest.FixtureRequest) -> int:
    """Return the number of the drive that fails."""
    number: int = request.param
    return number


@pytest.fixture(params=["daemon", "passthrough"])
def mount(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A mount of a new pool of three images, with blocks on all drives."""
    skip_without_mounts()
    with workplace() as images, workplace("disk") as place:
        sources = [str(images / f"{number}") for number in range(DRIVES)]
        run_kvfs("mkfs", *sources, "--capacity", "768M")
        with Mounted(listed(sources), place / "kv", f"--data-path={request.param}") as made:
            if request.param == "passthrough":
                require_passthrough(made)
            for number in range(BLOCKS):
                store(made.path, f"{number}", SIZE_BYTES, 1)
            yield made


class Loads(threading.Thread):
    """Inside a ``with`` loads blocks again and again; its end raises what went wrong."""

    def __init__(self, path: Path, names: set[str]) -> None:
        super().__init__()
        self._path, self._names = path, sorted(names)
        self._ends = threading.Event()
        self.loads = 0
        self._failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._ends.is_set():
                for name in self._names:
                    data = (self._path / name).read_bytes()
                    assert seed_of(data, name, SIZE_BYTES) == 1
                self.loads += 1
        except BaseException as error:  # a failed assertion too
            self._failure = error

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self.join()
        if self._failure is not None:
            raise self._failure


def draft_elsewhere(path: Path, failed: int) -> BinaryIO:
    """Begin a draft on a drive that is not to fail."""
    while True:
        draft = (path / "draft").open("xb", buffering=0)
        if Numbering(DRIVES).drive(InodeNo(os.fstat(draft.fileno()).st_ino)) != failed:
            return draft
        draft.close()
        (path / "draft").unlink()


def state_of(mount: Mounted, failed: int) -> str:
    """Return what the drive is."""
    return str(mount.status()["drives"][f"{failed}"]["state"])


def follow(mount: Mounted, number: int) -> None:
    """End the server, twice by SIGKILL and then by an upgrade, and adopt the next."""
    if number < 2:
        mount.kill_server()
        mount.follow_server()
    else:
        run_kvfs("upgrade", str(mount.path))
        mount.adopt()


def test_servers_that_are_killed_or_replaced_are_followed(mount: Mounted, failed: int) -> None:
    """No call on another drive fails, and nothing of the failed one comes back."""
    lost = names_on(mount.path, failed)
    kept = {f"{number}" for number in range(BLOCKS)} - lost
    loads = Loads(mount.path, kept)
    with (mount.path / min(lost)).open("rb") as held, draft_elsewhere(mount.path, failed) as draft:
        with loads:
            fail_drive(mount, failed)
            until(lambda: state_of(mount, failed) == "failed", "the server finds out")
            for number in range(3):
                follow(mount, number)
                assert state_of(mount, failed) == "missing"
                assert not any((mount.path / name).exists() for name in lost)
                store(mount.path, f"after {number}", SIZE_BYTES, 1)
                draft.write(b"%d" % number * 5000)
                before = loads.loads
                until(lambda before=before: loads.loads > before + 1, "loads go on")
        with contextlib.suppress(OSError):  # some of it may be in memory
            assert seed_of(held.read(), min(lost), SIZE_BYTES) == 1
    assert (mount.path / "draft").read_bytes() == b"".join(b"%d" % n * 5000 for n in range(3))
    there = kept | {"draft", *(f"after {number}" for number in range(3))}
    assert set(os.listdir(mount.path)) == there
    assert drives_of(mount.path)[failed] == 0
    status = mount.status()
    assert (status["restarts"], status["upgrades"]) == (2, 1)
    assert status["missing_drives"] == 1
    mount.remount()
    assert set(os.listdir(mount.path)) == there
    assert state_of(mount, failed) == "serving"


def test_after_all_processes_are_killed_it_is_not_believed(mount: Mounted, failed: int) -> None:
    """Its file system is back then; what was stored, replaced or removed meanwhile stays so."""
    lost = sorted(names_on(mount.path, failed))
    kept = {f"{number}" for number in range(BLOCKS)} - set(lost)
    fail_drive(mount, failed)
    seeds = dict.fromkeys(kept, 1) | {lost[0]: 2}
    store(mount.path, lost[0], SIZE_BYTES, 2)
    removed = min(kept)
    (mount.path / removed).unlink()
    del seeds[removed]
    run_kvfs("sync", str(mount.path))
    mount.kill_daemon()
    mount.start()
    assert state_of(mount, failed) == "serving"
    assert set(os.listdir(mount.path)) == seeds.keys()
    for name, seed in seeds.items():
        assert seed_of((mount.path / name).read_bytes(), name, SIZE_BYTES) == seed
