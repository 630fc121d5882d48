"""`kvfs drive` on a mount that is in use: what each drive holds, and one that is emptied."""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.core.drives import Numbering
from kvfs.core.errors import DriveNeeded, UsageError
from tests.fuse.conftest import PATHS
from tests.fuse.devices.conftest import mounted_drives
from tests.support.clients.at_work import Worker, all_go_on, at_work
from tests.support.clients.stamped import seed_of
from tests.support.clients.stepping import until
from tests.support.mounts.drives import DRIVES, drives_of, names_on, store
from tests.support.mounts.mounting import Mounted, run_kvfs

MIB: Final = 1 << 20
CAPACITY_BYTES: Final = DRIVES * 64 * MIB
BLOCKS: Final = 40
SIZE_BYTES: Final = 50_000
THREADS: Final = 2


@pytest.fixture(params=PATHS)
def mount(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A mount of a new pool on each data path; in the end its log holds no error."""
    with mounted_drives(request.param, CAPACITY_BYTES) as made:
        yield made


def drive(mount: Mounted, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a verb of `kvfs drive`, and return how it ended."""
    return run_kvfs("drive", verb, str(mount.path), *arguments, check=False)


class Client(Worker):
    """Stores blocks and loads what there is."""

    def __init__(self, path: Path, number: int) -> None:
        super().__init__(f"client-{number}")
        self._path, self._number = path, number
        self.stored = 0

    def work(self) -> None:
        """Store one, and load those of which the directory tells first."""
        name = f"{self._number}-{self.stored}"
        store(self._path, name, SIZE_BYTES, 1)
        self.stored += 1
        for entry in list(os.scandir(self._path))[:BLOCKS]:
            load(self._path / entry.name)


def load(path: Path) -> None:
    """A block is whole and right, or not there."""
    if path.suffix == ".tmp":
        return
    with contextlib.suppress(FileNotFoundError):
        assert seed_of(path.read_bytes(), path.name, SIZE_BYTES) == 1


@contextlib.contextmanager
def clients(mount: Mounted) -> Iterator[list[Client]]:
    """Some that store and load meanwhile; none of their calls fails."""
    made = [Client(mount.path, number) for number in range(THREADS)]
    with at_work(made):
        yield made


def stored_more(made: list[Client]) -> None:
    """Wait until each has stored some more blocks."""
    all_go_on(made, lambda client: client.stored, 3)


def test_opens_and_stores_are_counted_for_the_drive_of_the_block(mount: Mounted) -> None:
    """Of what was opened before, too, which the compiled reader answers by itself."""
    for number in range(BLOCKS):
        store(mount.path, f"{number}", 50_000, number)
    loads = [0] * DRIVES
    for entry in os.scandir(mount.path):
        for _ in range(drive := Numbering(DRIVES).drive(entry.inode()), 3):
            (mount.path / entry.name).read_bytes()
            loads[drive] += 1
    told = json.loads(run_kvfs("drive", "list", str(mount.path), "--json").stdout)
    rows = [told["drives"][f"{drive}"] for drive in range(DRIVES)]
    assert [row["stores"] for row in rows] == drives_of(mount.path)
    assert [row["opens"] for row in rows] == loads
    assert [row["errors"] for row in rows] == [0] * DRIVES
    heading, *lines = run_kvfs("drive", "list", str(mount.path)).stdout.splitlines()
    assert heading.split()[:3] == ["drive", "state", "capacity"]
    firsts = [line.split() for line in lines if line.split()[0] in ("0", "1", "2")]
    assert [first[0] for first in firsts] == ["0", "1", "2"]
    assert [first[7] for first in firsts] == [f"{row['opens']}" for row in rows]
    last_column = "".join(line[heading.index("source") :].strip() for line in lines)
    assert last_column == "".join(row["source"] + row["uuid"] for row in rows)


def test_a_drive_is_emptied_beside_its_clients_and_stays_so(mount: Mounted) -> None:
    """Also when the server is killed meanwhile, and after a remount; until it is undone."""
    for number in range(BLOCKS):
        store(mount.path, f"before {number}", SIZE_BYTES, 1)
    assert drives_of(mount.path)[1] > 0
    with clients(mount) as made:
        stored_more(made)
        begun = json.loads(drive(mount, "drain", "1", "--json").stdout)
        assert (begun["drive"], begun["blocks"] > 0) == (1, True)
        mount.kill_server()
        mount.follow_server()
        stored_more(made)
        until(lambda: mount.status()["drives"]["1"]["blocks"] == 0, "it is empty")
        stored_more(made)
        assert drives_of(mount.path)[1] == 0
    status = mount.status()
    assert status["drives"]["1"]["state"] in ("draining", "slow")
    assert status["cache"]["evicted"]["space"]["blocks"] == 0
    assert "ENOSPC" not in status["errors"]
    mount.remount()
    assert "left: 0 blocks" in drive(mount, "drain", "1").stdout
    for number in range(BLOCKS):
        store(mount.path, f"after {number}", SIZE_BYTES, 1)
    assert drives_of(mount.path)[1] == 0
    assert "takes blocks" in drive(mount, "drain", "1", "--undo").stdout
    for number in range(BLOCKS):
        store(mount.path, f"again {number}", SIZE_BYTES, 1)
    assert drives_of(mount.path)[1] > 0
    assert mount.status()["drives"]["1"]["state"] != "draining"


def test_what_is_pinned_or_open_stays_on_a_drive_that_is_emptied(mount: Mounted) -> None:
    for number in range(BLOCKS):
        store(mount.path, f"{number}", SIZE_BYTES, 1)
    pinned, opened, *_ = sorted(names_on(mount.path, 2))
    run_kvfs("pin", str(mount.path / pinned))
    with (mount.path / opened).open("rb") as file:
        drive(mount, "drain", "2")
        until(lambda: mount.status()["drives"]["2"]["blocks"] <= 2, "the others are gone")
        assert seed_of(file.read(), opened, SIZE_BYTES) == 1
    until(lambda: names_on(mount.path, 2) == {pinned}, "it went when it was closed")
    assert seed_of((mount.path / pinned).read_bytes(), pinned, SIZE_BYTES) == 1
    run_kvfs("unpin", str(mount.path / pinned))
    until(lambda: names_on(mount.path, 2) == set(), "and so did the pinned one")


def test_the_last_drive_that_takes_blocks_is_not_emptied(mount: Mounted) -> None:
    assert drive(mount, "drain", "0").returncode == 0
    assert drive(mount, "drain", "1").returncode == 0
    refused = drive(mount, "drain", "2")
    assert refused.returncode == DriveNeeded.exit_code
    assert "drive 2 is the only one that takes blocks" in refused.stderr
    assert mount.status()["drives"]["2"]["state"] != "draining"
    unknown = drive(mount, "drain", "3")
    assert unknown.returncode == UsageError.exit_code
    assert "there is no drive 3" in unknown.stderr
    for number in range(BLOCKS):
        store(mount.path, f"{number}", SIZE_BYTES, 1)
    assert drives_of(mount.path) == [0, 0, BLOCKS]
