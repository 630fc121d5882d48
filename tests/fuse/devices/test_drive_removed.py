"""`kvfs drive remove` on a mount that is in use: it stays removed, and is never believed again."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.core.errors import DriveNeeded, UsageError
from kvfs.core.source_list import listed, sources_of
from tests.fuse.conftest import PATHS
from tests.fuse.devices.conftest import mounted_drives
from tests.fuse.devices.test_drive_verbs import SIZE_BYTES, clients, drive, stored_more
from tests.support.clients.stamped import seed_of
from tests.support.clients.stepping import until
from tests.support.mounts.drives import DRIVES, drives_of, names_on, store
from tests.support.mounts.mounting import Mounted, run_kvfs

CAPACITY_BYTES: Final = DRIVES * (64 << 20)
BLOCKS: Final = 40
GONE: Final = 1
#: A server is killed while it has another one take over; and a block is given up that is open.
EXPECTED: Final = ("no upgrade: the server has just ended", f"drive {GONE} has failed")


@pytest.fixture(params=PATHS)
def mount(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A mount of a new pool on each data path, with blocks on all drives."""
    with mounted_drives(request.param, CAPACITY_BYTES, *EXPECTED) as made:
        for number in range(BLOCKS):
            store(made.path, f"{number}", SIZE_BYTES, 1)
        yield made


def leave_out(mount: Mounted, *numbers: int) -> list[str]:
    """Name the drives with these numbers nowhere any more; return them."""
    sources = sources_of(mount.source)
    mount.source = listed([one for at, one in enumerate(sources) if at not in numbers])
    return [sources[number] for number in numbers]


def header(source: str) -> dict[str, object]:
    """Return what POOL of a drive says."""
    said = json.loads((Path(source) / "POOL").read_text())
    assert isinstance(said, dict)
    return said


def all_whole(mount: Mounted, names: set[str]) -> None:
    """Just these are there, and whole."""
    assert set(os.listdir(mount.path)) == names
    for name in names:
        assert seed_of((mount.path / name).read_bytes(), name, SIZE_BYTES) == 1


def forgotten(mount: Mounted, names: set[str]) -> None:
    """Wait until only *names* are left of the blocks."""
    until(lambda: mount.status()["blocks"] == len(names), "what was there is forgotten")
    all_whole(mount, names)


def removed(mount: Mounted, *arguments: str, gone: int = GONE) -> dict[str, object]:
    """Remove a drive, and adopt the server that serves without it."""
    done = drive(mount, "remove", f"{gone}", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    mount.adopt()
    told = json.loads(done.stdout)
    assert isinstance(told, dict)
    return told


def test_an_empty_drive_is_removed_beside_clients_and_stays_so(mount: Mounted) -> None:
    """Over a kill, an upgrade and a remount; and the drive itself is refused."""
    refused = drive(mount, "remove", f"{GONE}")
    assert refused.returncode == DriveNeeded.exit_code
    held = len(names_on(mount.path, GONE))
    assert f"drive {GONE} holds {held} blocks" in refused.stderr
    assert len(names_on(mount.path, GONE)) == held
    sources = sources_of(mount.source)
    with clients(mount) as made:
        drive(mount, "drain", f"{GONE}")
        until(lambda: mount.status()["drives"][f"{GONE}"]["blocks"] == 0, "it is empty")
        until(lambda: mount.status()["drives"][f"{GONE}"]["used_bytes"] == 0, "of bytes, too")
        told = removed(mount)
        stored_more(made)
        mount.kill_server()
        mount.follow_server()
        stored_more(made)
        run_kvfs("upgrade", str(mount.path))
        mount.adopt()
        stored_more(made)
    assert (told["drive"], told["source"], told["in_use"]) == (GONE, sources[GONE], False)
    names = {entry.name for entry in os.scandir(mount.path)}
    assert drives_of(mount.path)[GONE] == 0
    status = mount.status()
    assert sorted(status["drives"]) == ["0", "2"]
    assert (status["missing_drives"], status["device_state"]) in ((0, "serving"), (0, "slow"))
    assert status["source"] == listed([sources[0], sources[2]])
    again = drive(mount, "remove", f"{GONE}")
    assert again.returncode == UsageError.exit_code
    assert f"there is no drive {GONE} any more" in again.stderr
    mount.stop()
    named = run_kvfs("mount", mount.source, str(mount.path), check=False)
    assert named.returncode == UsageError.exit_code
    assert f"{sources[GONE]} was removed from its pool, as drive {GONE}" in named.stderr
    leave_out(mount, GONE)
    assert "no problem" in run_kvfs("fsck", *sources_of(mount.source)).stdout
    mount.start("--all-drives")
    all_whole(mount, names)
    assert sorted(mount.status()["drives"]) == ["0", "2"]


def test_what_a_drive_holds_is_given_up_with_it(mount: Mounted) -> None:
    """Its blocks are misses, what is open is right or fails, and the others are all there."""
    lost = names_on(mount.path, GONE)
    kept = {f"{number}" for number in range(BLOCKS)} - lost
    with (mount.path / min(lost)).open("rb") as held:
        removed(mount, "--now")
        assert not any((mount.path / name).exists() for name in lost)
        for name in kept:
            assert seed_of((mount.path / name).read_bytes(), name, SIZE_BYTES) == 1
        try:
            data = held.read()
        except OSError:
            data = b""
        assert not data or seed_of(data, min(lost), SIZE_BYTES) == 1
    forgotten(mount, kept)
    mount.kill_daemon()
    (gone,) = leave_out(mount, GONE)
    mount.start()
    forgotten(mount, kept)
    assert header(gone)["removed"] == [GONE]
    alone = run_kvfs("fsck", gone, check=False)
    assert alone.returncode == UsageError.exit_code
    assert "was removed from its pool" in alone.stderr
    assert len(alone.stderr.splitlines()) == 1


def test_a_removed_drive_is_destroyed_and_joins_as_a_new_one(mount: Mounted) -> None:
    """With the next number: no inode number is given out twice."""
    kept = {f"{number}" for number in range(BLOCKS)} - names_on(mount.path, GONE)
    removed(mount, "--now")
    (gone,) = leave_out(mount, GONE)
    forgotten(mount, kept)
    part = run_kvfs("destroy", sources_of(mount.source)[1], "--yes", check=False)
    assert part.returncode != 0
    run_kvfs("destroy", gone, "--yes")
    added = drive(mount, "add", gone)
    assert added.returncode == 0, added.stderr
    assert "as before: the mount's --capacity says so" in added.stdout
    mount.adopt()
    assert sorted(mount.status()["drives"]) == ["0", "2", "3"]
    for number in range(BLOCKS):
        store(mount.path, f"more {number}", SIZE_BYTES, 1)
    assert mount.status()["drives"]["3"]["blocks"] > 0
    mount.source = listed([*sources_of(mount.source), gone])
    mount.remount()
    all_whole(mount, kept | {f"more {number}" for number in range(BLOCKS)})
    mount.stop()
    run_kvfs("destroy", *sources_of(mount.source), "--yes")
    mount.start()


@pytest.mark.parametrize("gone", [0, GONE])
def test_a_drive_that_is_missing_is_removed(mount: Mounted, gone: int) -> None:
    """And when it comes back, its own header does not know of it: the others' do."""
    lost = names_on(mount.path, gone)
    kept = {f"{number}" for number in range(BLOCKS)} - lost
    mount.stop()
    here = Path(sources_of(mount.source)[gone])
    away = here.with_name("away")
    here.rename(away)
    mount.start()
    forgotten(mount, kept)
    assert mount.status()["missing_drives"] == 1
    removed(mount, gone=gone)
    assert (mount.status()["missing_drives"], mount.status()["device_state"]) == (0, "serving")
    mount.stop()
    away.rename(here)
    named = run_kvfs("mount", mount.source, str(mount.path), check=False)
    assert named.returncode == UsageError.exit_code
    assert f"{here} was removed from its pool" in named.stderr
    leave_out(mount, gone)
    mount.start("--all-drives")
    all_whole(mount, kept)


def test_the_first_drive_and_the_last_that_takes_blocks_stay(mount: Mounted) -> None:
    first = drive(mount, "remove", "0", "--now")
    assert first.returncode == DriveNeeded.exit_code
    assert "drive 0 has the files of directories" in first.stderr
    assert "kvfs drive drain" in first.stderr
    for number in ("0", "1"):
        assert drive(mount, "drain", number).returncode == 0
    last = drive(mount, "remove", "2", "--now")
    assert last.returncode == DriveNeeded.exit_code
    assert "drive 2 is the only one that takes blocks" in last.stderr
    assert sorted(mount.status()["drives"]) == ["0", "1", "2"]


@pytest.mark.parametrize("pause_s", [0.0, 0.1, 0.3])
def test_a_server_that_is_killed_meanwhile_leaves_it_in_or_out(
    mount: Mounted, pause_s: float
) -> None:
    """After any of these times: what is there is whole, and once it is out it stays out."""
    lost = names_on(mount.path, GONE)
    everything = {f"{number}" for number in range(BLOCKS)}
    removing = threading.Thread(target=drive, args=(mount, "remove", f"{GONE}", "--now"))
    removing.start()
    threading.Event().wait(pause_s)
    os.kill(mount.status()["server_pid"], signal.SIGKILL)
    removing.join()
    mount.adopt()
    if f"{GONE}" in mount.status()["drives"]:
        left = everything - set(os.listdir(mount.path))
        assert left <= lost  # it drains already
        removed(mount, "--now")
    forgotten(mount, everything - lost)
    leave_out(mount, GONE)
    mount.remount()
    all_whole(mount, everything - lost)
