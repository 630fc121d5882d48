"""``kvfs warm`` on a real drive: the bytes are in memory afterwards, and no more than was asked."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.core.errors import NotMounted, PathMissing, UsageError
from tests.support.forks.process import run
from tests.support.kernel.caches import forget_blocks, pool_root
from tests.support.mounts.mounting import (
    COMMAND_WAIT_S,
    KVFS,
    ROOT,
    Mounted,
    loop_device,
    run_kvfs,
    skip_without_mounts,
    workplace,
)

pytestmark = [pytest.mark.needs_fuse, pytest.mark.needs_loop, pytest.mark.one_data_path]

MIB = 1 << 20
BLOCKS = 12
#: Of what was read, that much is in memory: the kernel may take a page again for other tests.
SHARE = 0.99


@pytest.fixture(scope="module")
def pool() -> Iterator[Mounted]:
    """A mount of a drive with some blocks of 1 MiB."""
    skip_without_mounts()
    with workplace() as place, loop_device(420 * MIB) as drive:
        (place / "kv").mkdir()
        with Mounted(Path(drive), place / "kv") as mounted:
            for directory in ("a", "b/deep"):
                (mounted.path / directory).mkdir(parents=True)
                for number in range(BLOCKS // 2):
                    draft = mounted.path / directory / "x.tmp"
                    draft.write_bytes(os.urandom(MIB))
                    draft.rename(mounted.path / directory / f"{number}.data")
            yield mounted
            mounted.stop()
            assert mounted.errors() == []


def chill(mount: Mounted) -> None:
    """Let no block be in memory."""
    os.sync()
    forget_blocks(mount)
    assert cached_bytes(mount) < MIB


def cached_bytes(mount: Mounted) -> int:
    """Return how much of all extents is in the page cache; some may be unlinked meanwhile."""
    extents = [one for one in (pool_root(mount) / "extents").rglob("*") if one.is_file()]
    shown = subprocess.run(
        ["fincore", "--bytes", "--noheadings", "--output", "RES", *map(str, extents)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert all("No such file" in line for line in shown.stderr.splitlines()), shown.stderr
    return sum(map(int, shown.stdout.split()))


def warm(*arguments: str | Path) -> dict[str, Any]:
    done = json.loads(run_kvfs("warm", *map(str, arguments), "--json").stdout)
    assert isinstance(done, dict)
    return done


def test_files_and_directories_are_in_memory_afterwards(pool: Mounted) -> None:
    chill(pool)
    done = warm(pool.path / "a")
    assert (done["blocks"], done["bytes"]) == (BLOCKS // 2, BLOCKS // 2 * MIB)
    assert BLOCKS // 2 * MIB * SHARE <= cached_bytes(pool) < BLOCKS * MIB * SHARE
    said = run_kvfs("warm", str(pool.path / "a" / "0.data"), str(pool.path / "b")).stdout
    assert said.startswith("7 blocks, 7 MiB read in ")
    assert cached_bytes(pool) >= BLOCKS * MIB * SHARE


def test_no_more_and_no_faster_than_asked(pool: Mounted) -> None:
    chill(pool)
    done = warm(pool.path, "--bytes", "2M", "--rate", "5M")
    assert (done["bytes"], done["stopped_at_bytes"]) == (2 * MIB, 2 * MIB)
    assert done["took_s"] >= 0.3  # 2 MiB at 5 MiB a second, less a burst
    said = run_kvfs("warm", str(pool.path), "--bytes", "1M").stdout
    assert said.endswith("; stopped at --bytes 1 MiB\n")


def test_a_list_on_standard_input(pool: Mounted) -> None:
    """Whatever stands there: only blocks of a kvfs mount are opened."""
    chill(pool)
    (pool.path / "link").symlink_to("a/0.data")
    names = [*(pool.path / "a").iterdir(), pool.path / "gone", "/etc/passwd", "/dev/zero"]
    names.append(pool.path / "link")
    done = run(
        [*KVFS, "warm", "-", "--json"],
        input="".join(f"{name}\n" for name in names),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=COMMAND_WAIT_S,
        check=True,
    )
    (pool.path / "link").unlink()
    told = json.loads(done.stdout)
    assert told["blocks"] == BLOCKS // 2
    assert told["left"] == {"gone": 1, "not on this mount": 1, "not a file": 2}
    assert cached_bytes(pool) >= BLOCKS // 2 * MIB * SHARE


def test_what_was_hottest_before_the_last_stop(pool: Mounted) -> None:
    hot = [pool.path / "a" / "3.data", pool.path / "b" / "deep" / "5.data"]
    for block in hot:
        block.read_bytes()
    pool.remount()
    listed = run_kvfs("warm", "--hottest", str(pool.path), "--bytes", "2M", "--dry-run").stdout
    assert listed.splitlines() == [str(block) for block in reversed(hot)]
    chill(pool)
    done = warm("--hottest", pool.path)
    assert done["blocks"] == BLOCKS
    assert cached_bytes(pool) >= BLOCKS * MIB * SHARE


@pytest.mark.parametrize(
    ("arguments", "exit_code", "said"),
    [
        (("/etc",), NotMounted.exit_code, "/etc is not on a kvfs mount"),
        (("{kv}/none",), PathMissing.exit_code, "there is no "),
        (("{kv}", "--bytes", "0"), UsageError.exit_code, "--bytes must be greater than 0"),
        (("{kv}", "--rate", "much"), UsageError.exit_code, "--rate: 'much' is not a size"),
    ],
)
def test_mistakes_are_one_line(
    pool: Mounted, arguments: tuple[str, ...], exit_code: int, said: str
) -> None:
    done = run_kvfs("warm", *(one.format(kv=pool.path) for one in arguments), check=False)
    assert done.returncode == exit_code
    (line,) = done.stderr.splitlines()
    assert said in line
