"""`kvfs drive add` on a mount that is in use; and what a kill in the middle leaves."""

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.core.drives import Numbering
from kvfs.core.errors import SourceForeign, UsageError
from kvfs.core.source_list import listed
from kvfs.core.types import InodeNo
from tests.fuse.conftest import PATHS, fail_if_any, require_passthrough
from tests.fuse.devices.conftest import skip_without_server
from tests.fuse.devices.test_drive_verbs import SIZE_BYTES, clients, drive, stored_more
from tests.support.clients.stamped import seed_of
from tests.support.clients.stepping import until
from tests.support.mounts.drives import store
from tests.support.mounts.mounting import (
    Mounted,
    own_tmpfs,
    run_kvfs,
    workplace,
)

BLOCKS: Final = 20
DRIVE_BYTES: Final = 400 << 20


@pytest.fixture(params=PATHS)
def place(request: pytest.FixtureRequest) -> Iterator[tuple[Path, str]]:
    """Yield a directory, and a data path."""
    skip_without_server(request.param)
    with workplace("disk") as made:
        yield made, request.param


@contextlib.contextmanager
def mounted(place: tuple[Path, str], sources: list[str]) -> Iterator[Mounted]:
    """Yield a mount of *sources*; in the end its log holds no error."""
    with Mounted(listed(sources), place[0] / "kv", f"--data-path={place[1]}") as made:
        if place[1] == "passthrough":
            require_passthrough(made)
        yield made
        made.stop()
        killed = (
            "starting it again",
            "no upgrade: the server has just ended",
            "the upgrade has failed: the version before serves again",
        )
        fail_if_any([line for line in made.errors() if not any(word in line for word in killed)])


@contextlib.contextmanager
def directories(count: int) -> Iterator[list[str]]:
    """Yield blank directories, each in memory of its own."""
    with contextlib.ExitStack() as stack:
        yield [str(stack.enter_context(own_tmpfs())) for _ in range(count)]


def images(place: tuple[Path, str], count: int) -> list[str]:
    """Return blank images."""
    paths = [place[0] / f"image{number}" for number in range(count)]
    for path in paths:
        path.touch()
        os.truncate(path, DRIVE_BYTES)
    return [str(path) for path in paths]


def drives_of(mount: Mounted, drives: int) -> list[int]:
    """Return how many blocks lie on each of so many drives."""
    found = [0] * drives
    for entry in os.scandir(mount.path):
        found[Numbering(drives).drive(InodeNo(entry.inode()))] += 1
    return found


def store_some(mount: Mounted, word: str) -> list[str]:
    """Store blocks, and return their names."""
    names = [f"{word}-{number}" for number in range(BLOCKS)]
    for name in names:
        store(mount.path, name, SIZE_BYTES, 1)
    return names


def all_whole(mount: Mounted, names: list[str]) -> None:
    """All are there, and whole."""
    for name in names:
        assert seed_of((mount.path / name).read_bytes(), name, SIZE_BYTES) == 1


@pytest.mark.parametrize("before", [1, 2])
def test_a_drive_is_added_beside_its_clients(place: tuple[Path, str], before: int) -> None:
    """A pool of one becomes one of two. It stays so when servers die, and after a remount."""
    with directories(before + 1) as all_of, mounted(place, all_of[:before]) as mount:
        names = store_some(mount, "before")
        capacity_bytes = mount.status()["capacity_bytes"]
        with clients(mount) as made:
            stored_more(made)
            told = json.loads(drive(mount, "add", all_of[before], "--json").stdout)
            mount.adopt()
            stored_more(made)
            mount.kill_server()
            mount.follow_server()
            stored_more(made)
        assert told["drive"] == before
        names += store_some(mount, "after")
        assert drives_of(mount, before + 1)[before] > 0
        all_whole(mount, names)
        status = mount.status()
        assert status["capacity_bytes"] > capacity_bytes
        assert status["source"] == listed(all_of)
        assert status["drives"][f"{before}"]["uuid"] == told["uuid"]
        mount.source = listed(all_of)
        mount.remount()
        all_whole(mount, names)
        assert mount.status()["drives"][f"{before}"]["blocks"] > 0


@pytest.mark.parametrize("pause_s", [0.0, 0.05, 0.1, 0.2, 0.4])
def test_a_server_that_is_killed_meanwhile_leaves_the_old_drives_or_all(
    place: tuple[Path, str], pause_s: float
) -> None:
    """After any of these times: what counts is that all of it holds for each."""
    with directories(2) as all_of, mounted(place, all_of[:1]) as mount:
        names = store_some(mount, "before")
        adding = threading.Thread(target=drive, args=(mount, "add", all_of[1]))
        adding.start()
        until(lambda: (Path(all_of[1]) / "POOL").exists() or not adding.is_alive(), "it is made")
        threading.Event().wait(pause_s)
        os.kill(mount.status()["server_pid"], signal.SIGKILL)
        adding.join()
        mount.adopt()
        all_whole(mount, names)
        if len(mount.status()["drives"]) == 1:
            added = drive(mount, "add", all_of[1])
            assert added.returncode == 0, added.stderr
            mount.adopt()
        names += store_some(mount, "after")
        all_whole(mount, names)
        assert min(drives_of(mount, 2)) > 0


def test_an_image_is_added(place: tuple[Path, str]) -> None:
    """An XFS of its own, which outlives the server that added it and is let go at the end."""
    all_of = images(place, 2)
    with mounted(place, all_of[:1]) as mount:
        names = store_some(mount, "before")
        assert drive(mount, "add", all_of[1]).returncode == 0
        mount.adopt()
        names += store_some(mount, "after")
        assert drives_of(mount, 2)[1] > 0
        all_whole(mount, names)
        mount.stop()
        done = run_kvfs("fsck", *all_of)
        assert f"{len(names)} blocks, 1 directory, no problem" in done.stdout
        mount.source = listed(all_of)
        mount.start()
        all_whole(mount, names)


def test_what_cannot_be_added_is_left_as_it_is(place: tuple[Path, str]) -> None:
    with directories(2) as all_of, mounted(place, all_of[:1]) as mount:
        (image,) = images(place, 1)
        unlike = drive(mount, "add", image)
        assert unlike.returncode == UsageError.exit_code
        assert "either directories or drives and image files" in unlike.stderr
        twice = drive(mount, "add", all_of[0])
        assert twice.returncode == UsageError.exit_code
        assert "is given twice" in twice.stderr
        (Path(all_of[1]) / "somebody's").write_text("data")
        assert drive(mount, "add", all_of[1]).returncode == SourceForeign.exit_code
        assert os.listdir(all_of[1]) == ["somebody's"]
        assert list(mount.status()["drives"]) == ["0"]
