"""A proof, run by ``make proof``: a million names in one directory, made, listed and found.

Prints its figures as JSON, and writes them to KVFS_PROOF_DIR where that is set. KVFS_PROOF_NAMES
makes it shorter, KVFS_PROOF_SOURCE=xfs|tmpfs|disk chooses what lies under the mount.
"""

import json
import os
import platform
import random
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import pytest

from tests.fuse.conftest import pool_source
from tests.support.mounts.mounting import Mounted, skip_without_mounts, workplace

pytestmark = [pytest.mark.proof, pytest.mark.needs_fuse, pytest.mark.needs_loop]

NAMES: Final = int(os.environ.get("KVFS_PROOF_NAMES", "1000000"))
SOURCE: Final = os.environ.get("KVFS_PROOF_SOURCE", "xfs")
#: The last tenth is made in turns with as many names in a pool that is empty: what else the
#: machine does is the same for both.
SLICES: Final = 10
PAIRS: Final = 20
LOOKUPS: Final = NAMES // 10
DEVICE_BYTES: Final = 16 << 30
RATE_RATIO_MIN: Final = 0.8
ANONYMOUS_MAX_BYTES: Final = 300 * 10**6


def name_of(number: int) -> str:
    """Return a name as LMCache makes them: long, with a hash at its end."""
    return f"meta-llama_Llama-3.1-8B@1@0@{random.Random(number).getrandbits(128):032x}.data"


def anonymous_bytes(pid: int) -> int:
    """Return the memory that only this process has (RssAnon)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def server_cpu_s(pid: int) -> float:
    """Return the processor time of a process, of user and kernel, threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def create(directory: int, first: int, count: int, content: bytes) -> None:
    """Create *count* files in an open directory, one after the other."""
    for number in range(first, first + count):
        fd = os.open(name_of(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600, dir_fd=directory)
        if content:
            os.write(fd, content)
        os.close(fd)


def rate_of(work: Callable[[], object], count: int) -> float:
    """Run *work* and return how many of its *count* steps it did a second."""
    begin = time.perf_counter()
    work()
    return count / (time.perf_counter() - begin)


def look_up(directory: int, numbers: list[int], *, present: bool) -> None:
    """Stat names that are all there, or all absent."""
    for number in numbers:
        try:
            os.stat(name_of(number) + ("" if present else "x"), dir_fd=directory)
            found = True
        except FileNotFoundError:
            found = False
        assert found == present


def listed_names(path: Path) -> set[str]:
    """List a directory; a name that comes twice fails."""
    names = os.listdir(path)
    assert len(set(names)) == len(names)
    return set(names)


@pytest.mark.parametrize("size_bytes", [0, 4096])
def test_a_million_names_in_one_directory(size_bytes: int) -> None:
    """[readdir-large] The last tenth as fast as the first; memory bounded; all is found."""
    skip_without_mounts()
    content = random.Random(0).randbytes(size_bytes)
    figures: dict[str, Any] = {"names": NAMES, "size_bytes": size_bytes, "source": SOURCE}
    with (
        workplace("disk") as place,
        pool_source(SOURCE, DEVICE_BYTES) as source,
        pool_source(SOURCE, DEVICE_BYTES) as empty,
        Mounted(source, place / "kv") as mounted,
    ):
        blocks = mounted.path / "blocks"
        blocks.mkdir()
        figures |= fill(mounted, blocks, content)
        with Mounted(empty, place / "small") as small:
            figures |= fill_in_turns(mounted, small, content)
        figures |= list_and_find(blocks, "warm")
        mounted.remount()
        figures |= list_and_find(blocks, "after_remount")
        figures["anonymous_after_remount_bytes"] = anonymous_bytes(mounted.server_pid)
        figures["data_path"] = mounted.status()["data_path"]
        figures["kernel"] = platform.release()
        assert mounted.status()["blocks"] == NAMES
        if size_bytes:
            with open(blocks / name_of(NAMES - 1), "rb") as file:
                assert file.read() == content
    report(figures)
    assert figures["rate_ratio"] >= RATE_RATIO_MIN
    most_bytes = max(figures["anonymous_max_bytes"], figures["anonymous_full_bytes"])
    assert most_bytes < ANONYMOUS_MAX_BYTES


def fill(mounted: Mounted, blocks: Path, content: bytes) -> dict[str, Any]:
    """Create all names but the last tenth; return each tenth's rate and the most memory seen."""
    rates, memory = [], [anonymous_bytes(mounted.server_pid)]
    used_s = [server_cpu_s(mounted.server_pid)]
    slice_names = NAMES // SLICES
    directory = os.open(blocks, os.O_PATH)
    try:
        for number in range(SLICES - 1):
            first = number * slice_names
            work = partial(create, directory, first, slice_names, content)
            rates.append(rate_of(work, slice_names))
            memory.append(anonymous_bytes(mounted.server_pid))
            used_s.append(server_cpu_s(mounted.server_pid))
    finally:
        os.close(directory)
    return {
        "creates_per_s": [round(rate) for rate in rates],
        # Tells a slower directory from a machine that did something else meanwhile.
        "server_cpu_us_per_create": [
            round((after - before) / slice_names * 1e6) for before, after in pairwise(used_s)
        ],
        "anonymous_at_start_bytes": memory[0],
        "anonymous_max_bytes": max(memory),
    }


def fill_in_turns(mounted: Mounted, small: Mounted, content: bytes) -> dict[str, Any]:
    """Create the last tenth, a part of it in turns with as many names where there are few."""
    (small.path / "blocks").mkdir()
    part_names = NAMES // SLICES // PAIRS
    first = NAMES - PAIRS * part_names
    directories = [os.open(each.path / "blocks", os.O_PATH) for each in (mounted, small)]
    pairs: list[list[float]] = []
    try:
        create(
            directories[0], NAMES - NAMES // SLICES, NAMES // SLICES - PAIRS * part_names, content
        )
        for number in range(PAIRS):
            begin = first + number * part_names
            # Who comes first takes turns, too.
            order = (0, 1) if number % 2 else (1, 0)
            pair = [0.0, 0.0]
            for side in order:
                work = partial(create, directories[side], begin, part_names, content)
                pair[side] = rate_of(work, part_names)
            pairs.append(pair)
    finally:
        for directory in directories:
            os.close(directory)
    return {
        "creates_per_s_last_tenth": round(median(large for large, _ in pairs)),
        "creates_per_s_empty_pool": round(median(few for _, few in pairs)),
        "rate_ratio": round(median(large / few for large, few in pairs), 3),
        "rate_ratios": [round(large / few, 3) for large, few in pairs],
        "anonymous_full_bytes": anonymous_bytes(mounted.server_pid),
    }


def list_and_find(blocks: Path, when: str) -> dict[str, Any]:
    """List the directory, then look up present and absent names in random order."""
    numbers = random.Random(when).sample(range(NAMES), LOOKUPS)
    names: list[set[str]] = []
    listing = rate_of(lambda: names.append(listed_names(blocks)), NAMES)
    assert names[0] == {name_of(number) for number in range(NAMES)}
    directory = os.open(blocks, os.O_PATH)
    try:
        hits = rate_of(lambda: look_up(directory, numbers, present=True), LOOKUPS)
        misses = rate_of(lambda: look_up(directory, numbers, present=False), LOOKUPS)
    finally:
        os.close(directory)
    figures = {"listed": listing, "hits": hits, "misses": misses}
    return {f"{name}_per_s_{when}": round(rate) for name, rate in figures.items()}


def report(figures: dict[str, Any]) -> None:
    """Print the figures, and keep them where KVFS_PROOF_DIR says."""
    text = json.dumps(figures, indent=2)
    print(text)
    if (directory := os.environ.get("KVFS_PROOF_DIR")) is not None:
        Path(directory, f"million_names_{figures['size_bytes']}.json").write_text(text + "\n")
