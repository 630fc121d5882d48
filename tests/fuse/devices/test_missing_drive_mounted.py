"""A pool of three drives, mounted while one is missing: the rest is served until it comes back."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.core.drives import Numbering
from kvfs.core.errors import DriveMissing, SourceMissing, UsageError
from kvfs.core.source_list import listed, sources_of
from kvfs.core.types import InodeNo
from tests.fuse.conftest import PATHS
from tests.fuse.devices.conftest import mounted_drives
from tests.support.clients.stamped import seed_of
from tests.support.clients.stepping import until
from tests.support.mounts.drives import (
    DRIVES,
    drives_of,
    extents_of,
    names_on,
    store,
)
from tests.support.mounts.mounting import Mounted, run_kvfs

MIB: Final = 1 << 20
CAPACITY_BYTES: Final = DRIVES * 128 * MIB
BLOCKS: Final = 30
SIZE_BYTES: Final = 100_000


@pytest.fixture(params=PATHS)
def mount(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A mount of a new pool on each data path, with blocks on all drives."""
    with mounted_drives(request.param, CAPACITY_BYTES) as made:
        for number in range(BLOCKS):
            store(made.path, f"{number}", SIZE_BYTES, 1)
        yield made


@pytest.fixture(params=[0, 2])
def gone(request: pytest.FixtureRequest) -> int:
    """Return the number of the drive that goes away."""
    number: int = request.param
    return number


def place_of(mount: Mounted, gone: int) -> tuple[Path, Path]:
    """Return where the drive is that goes away, and where it is kept meanwhile."""
    here = Path(sources_of(mount.source)[gone])
    return here, here.with_name("away")


def take_away(mount: Mounted, gone: int) -> None:
    """Take one of the drives of a pool that is not mounted."""
    here, away = place_of(mount, gone)
    here.rename(away)


def bring_back(mount: Mounted, gone: int) -> None:
    here, away = place_of(mount, gone)
    away.rename(here)


def load_all(path: Path, seeds: dict[str, int]) -> None:
    """Load what is to be there; and nothing else is."""
    assert set(os.listdir(path)) == seeds.keys()
    for name, seed in seeds.items():
        assert seed_of((path / name).read_bytes(), name, SIZE_BYTES) == seed


def settled(mount: Mounted, blocks: int) -> dict[str, object]:
    """Return the status once the pool counts *blocks*."""
    until(lambda: mount.status()["blocks"] == blocks, "what is lost is forgotten")
    return mount.status()


def test_the_rest_is_served_and_a_line_says_what_is_missing(mount: Mounted, gone: int) -> None:
    lost = names_on(mount.path, gone)
    uuid = mount.status()["drives"][f"{gone}"]["uuid"]
    mount.stop()
    take_away(mount, gone)
    checked = run_kvfs("fsck", *sources_of(mount.source), check=False)
    assert checked.returncode == DriveMissing.exit_code
    assert f"drive {gone} (UUID {uuid}) cannot be found" in checked.stderr
    assert f"so {len(lost)} blocks there were not checked" in checked.stderr
    assert "30 blocks, 1 directory, no problem" in checked.stdout
    strict = run_kvfs("mount", "--all-drives", mount.source, str(mount.path), check=False)
    assert strict.returncode == SourceMissing.exit_code
    assert f"drive {gone} (UUID {uuid}) cannot be found" in strict.stderr
    flags = ("--log-file", str(mount.log_file), *mount.flags)
    said = run_kvfs("mount", mount.source, str(mount.path), *flags).stderr
    mount.adopt()
    (line,) = said.splitlines()
    assert f"drive {gone} (UUID {uuid}) is missing: " in line
    assert "does not exist yet; its blocks are misses. Mount again with it" in line
    for name in lost:
        assert not (mount.path / name).exists()
    kept = {f"{number}": 1 for number in range(BLOCKS) if f"{number}" not in lost}
    load_all(mount.path, kept)
    status = settled(mount, len(kept))
    row = status["drives"][f"{gone}"]
    assert (row["state"], row["uuid"], row["blocks"]) == ("missing", uuid, 0)
    assert row["source"] == str(place_of(mount, gone)[0])
    assert status["missing_drives"] == 1
    assert status["capacity_bytes"] == CAPACITY_BYTES * 2 // 3
    assert os.statvfs(mount.path).f_blocks * 4096 == CAPACITY_BYTES * 2 // 3
    for number in range(6):
        store(mount.path, f"more {number}", SIZE_BYTES, 2)
    assert drives_of(mount.path)[gone] == 0
    load_all(mount.path, kept | {f"more {number}": 2 for number in range(6)})
    assert (
        f"{gone}: source {row['source']}, state missing"
        in run_kvfs("status", str(mount.path)).stdout
    )
    rows = json.loads(run_kvfs("drive", "list", str(mount.path), "--json").stdout)
    assert f'"{uuid}"' in json.dumps(rows)
    assert json.loads(run_kvfs("doctor", str(mount.path), "--json", check=False).stdout)
    mount.stop()
    bring_back(mount, gone)
    mount.start()


@pytest.mark.parametrize("end", ["stop", "kill_daemon"])
def test_a_drive_that_comes_back_has_no_block_that_was_lost(
    mount: Mounted, gone: int, end: str
) -> None:
    lost = sorted(names_on(mount.path, gone))
    mount.stop()
    take_away(mount, gone)
    mount.start()
    seeds = {f"{number}": 1 for number in range(BLOCKS) if f"{number}" not in lost}
    for name in lost[:3]:
        store(mount.path, name, SIZE_BYTES, 3)
    seeds |= dict.fromkeys(lost[:3], 3)
    for name in lost[3:6]:
        with pytest.raises(FileNotFoundError):
            (mount.path / name).unlink()
    rewritten = next(iter(seeds.keys() - set(lost)))
    store(mount.path, rewritten, SIZE_BYTES, 4)
    seeds[rewritten] = 4
    settled(mount, len(seeds))
    run_kvfs("sync", str(mount.path))
    getattr(mount, end)()
    bring_back(mount, gone)
    mount.start()
    load_all(mount.path, seeds)
    assert mount.status()["drives"][f"{gone}"]["state"] == "serving"
    until(lambda: not blocks_before(mount, gone), "what it had is removed")
    for number in range(9):
        store(mount.path, f"more {number}", SIZE_BYTES, 5)
    assert drives_of(mount.path)[gone] >= 3
    mount.stop()
    done = run_kvfs("fsck", *sources_of(mount.source))
    assert f"{len(seeds) + 9} blocks, 1 directory, no problem" in done.stdout
    assert gone not in drives_of_strays(done.stdout)
    assert extents_of(mount)[gone] <= 12 * 2 * SIZE_BYTES
    mount.start()


def drives_of_strays(said: str) -> set[int]:
    """Return the drives with a file that no name leads to, of which ``kvfs fsck`` has *said* so.

    A kill may come before what a rewrite replaced is removed; then it is kept aside for a day.
    """
    found = re.findall(r"no name leads to inode (0x[0-9a-f]+),", said)
    return {Numbering(DRIVES).drive(InodeNo(int(ino, 16))) for ino in found}


def blocks_before(mount: Mounted, gone: int) -> list[Path]:
    """Return the extents of blocks on the drive that came back, with those that are kept aside."""
    drive = Path(sources_of(mount.source)[gone])
    files = [*(drive / "extents").glob("??/*"), *(drive / "strays").glob("*")]
    return [file for file in files if file.stat().st_size]


def test_a_drive_of_another_pool_in_its_place_is_refused(mount: Mounted, gone: int) -> None:
    mount.stop()
    take_away(mount, gone)
    here, _ = place_of(mount, gone)
    here.mkdir()
    run_kvfs("mkfs", str(here))
    refused = run_kvfs("mount", mount.source, str(mount.path), check=False)
    assert refused.returncode == UsageError.exit_code
    assert len(refused.stderr.splitlines()) == 1
    assert f"{here} is a pool of one drive" in refused.stderr
    run_kvfs("destroy", str(here), "--yes")
    here.rmdir()
    bring_back(mount, gone)
    mount.start()
    load_all(mount.path, {f"{number}": 1 for number in range(BLOCKS)})


def test_servers_that_are_killed_or_replaced_are_followed(mount: Mounted, gone: int) -> None:
    lost = names_on(mount.path, gone)
    mount.stop()
    take_away(mount, gone)
    mount.start()
    kept = {f"{number}": 1 for number in range(BLOCKS) if f"{number}" not in lost}
    with (mount.path / "draft").open("xb", buffering=0) as draft:
        draft.write(b"a" * 5000)
        mount.kill_server()
        mount.follow_server()
        run_kvfs("upgrade", str(mount.path))
        mount.adopt()
        draft.write(b"b" * 5000)
    assert (mount.path / "draft").read_bytes() == b"a" * 5000 + b"b" * 5000
    (mount.path / "draft").unlink()
    load_all(mount.path, kept)
    status = mount.status()
    assert (status["restarts"], status["upgrades"]) == (1, 1)
    assert status["drives"][f"{gone}"]["state"] == "missing"
    mount.stop()
    bring_back(mount, gone)
    mount.start()


def test_parts_of_a_pool_share_nothing_while_both_are_mounted(mount: Mounted) -> None:
    """Each has LOCK alone to tell; of what both did the part that was mounted later counts."""
    on_first = names_on(mount.path, 0)
    first, *others = sources_of(mount.source)
    all_sources = mount.source
    run_kvfs("sync", str(mount.path))  # to the part alone it is as after a loss of power
    mount.kill_daemon()
    mount.source = listed(others)
    mount.start()
    rest = {f"{number}": 1 for number in range(BLOCKS) if f"{number}" not in on_first}
    settled(mount, len(rest))
    with Mounted(first, mount.path.with_name("part"), *mount.flags) as part:
        load_all(part.path, dict.fromkeys(on_first, 1))
        store(part.path, "of the part", SIZE_BYTES, 2)
        store(mount.path, "of the rest", SIZE_BYTES, 3)
        load_all(part.path, dict.fromkeys(on_first, 1) | {"of the part": 2})
        load_all(mount.path, rest | {"of the rest": 3})
        part.stop()
    mount.kill_server()
    mount.follow_server()
    load_all(mount.path, rest | {"of the rest": 3})
    mount.stop()
    mount.source = all_sources
    mount.start()
    assert "of the part" in os.listdir(mount.path)
    assert "of the rest" not in os.listdir(mount.path)
