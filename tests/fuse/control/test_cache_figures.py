"""The cache's own figures are those that its client counts: hits, misses, stores and bytes."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from kvfs.core.changed import Reason
from tests.support.clients.cache_client import CacheClient
from tests.support.clients.stepping import until
from tests.support.kernel.calls import write_file
from tests.support.kernel.message_counts import mounted_with
from tests.support.mounts.mounting import Mounted, run_kvfs

pytestmark = pytest.mark.needs_fuse

#: Until a look counts as a miss, and more.
_COMPUTED_S: Final = 0.3


def counted(mount: Mounted, kv: Path) -> dict[str, Any]:
    """What kvfs has counted in the first-level directory *kv*; zeros before the first."""
    found = mount.status()["cache"]["directories"].get(kv.name)
    return found or dict.fromkeys(("hits", "misses", "stored_blocks", "loaded_bytes"), 0)


def until_counted(mount: Mounted, kv: Path, **wanted: int) -> None:
    """Wait until the counts are those *wanted*: a miss counts a moment after its look."""

    def holds() -> bool:
        found = counted(mount, kv)
        return {name: found[name] for name in wanted} == wanted

    until(holds, f"{wanted}, but {counted(mount, kv)}")


def compute() -> None:
    """What a client does between its look and its store: something else, in another process."""
    subprocess.run(["sleep", str(_COMPUTED_S)], check=True)


def test_hits_misses_and_stores_are_those_of_the_client(mount: Mounted, kv: Path) -> None:
    client = CacheClient(kv)
    for _ in range(3):
        for number in range(20):
            if not client.load(f"block-{number}"):
                client.store(f"block-{number}")
    assert (client.hits, client.misses) == (40, 20)
    until_counted(mount, kv, hits=40, misses=20, stored_blocks=20, loaded_bytes=client.loaded_bytes)


def test_the_sum_is_that_of_all_directories(mount: Mounted, kv: Path) -> None:
    before = mount.status()["cache"]
    write_file(kv / "one", b"1")
    (kv / "one").read_bytes()
    after = mount.status()["cache"]
    assert after["hits"] == before["hits"] + 1
    for name in ("hits", "misses", "stored_blocks", "stored_bytes", "loaded_bytes"):
        assert after[name] == sum(each[name] for each in after["directories"].values())


def test_reads_through_a_directory_below_count_in_the_first_level(mount: Mounted, kv: Path) -> None:
    (kv / "a" / "b").mkdir(parents=True)
    write_file(kv / "a" / "b" / "block", b"1")
    write_file(kv / "a" / "b" / "other", b"1")
    (kv / "a" / "b" / "block").read_bytes()
    until_counted(mount, kv, hits=1, misses=0)
    moved = kv.parent / f"{kv.name}-moved"
    moved.mkdir()
    os.rename(kv / "a", moved / "a")
    try:
        (moved / "a" / "b" / "other").read_bytes()
        until_counted(mount, moved, hits=1, misses=0)
        until_counted(mount, kv, hits=1, misses=0)
    finally:
        os.rename(moved / "a", kv / "a")
        moved.rmdir()


def _renamed(kv: Path) -> None:
    write_file(kv / "block.tmp", b"1")
    os.rename(kv / "block.tmp", kv / "block")


def _in_place(kv: Path) -> None:
    write_file(kv / "block", b"1")


def _exclusive(kv: Path) -> None:
    os.close(os.open(kv / "block", os.O_WRONLY | os.O_CREAT | os.O_EXCL))


def _renamed_before_close(kv: Path) -> None:
    fd = os.open(kv / "block.tmp", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"1")
    os.rename(kv / "block.tmp", kv / "block")
    os.close(fd)


def _unknown_temporary_name(kv: Path) -> None:
    write_file(kv / "elsewhere", b"1")
    os.rename(kv / "elsewhere", kv / "block")


STORES: Final[dict[str, Callable[[Path], None]]] = {
    "renamed": _renamed,
    "in-place": _in_place,
    "exclusive": _exclusive,
    "renamed-before-close": _renamed_before_close,
    "unknown-temporary-name": _unknown_temporary_name,
}


@pytest.mark.parametrize("how", STORES)
def test_a_store_without_a_look_is_no_miss(mount: Mounted, kv: Path, how: str) -> None:
    STORES[how](kv)
    compute()
    until_counted(mount, kv, misses=0, stored_blocks=1, hits=0)


@pytest.mark.parametrize("how", STORES)
def test_a_store_after_a_look_is_one_miss(mount: Mounted, kv: Path, how: str) -> None:
    """vLLM and LMCache look, compute, and store; most look again just before they store."""
    assert not os.path.exists(kv / "block")
    compute()
    assert not os.path.exists(kv / "block")
    STORES[how](kv)
    compute()
    until_counted(mount, kv, misses=1, stored_blocks=1, hits=0)


def test_what_the_kernel_answers_from_its_memory_is_not_seen(mount: Mounted, kv: Path) -> None:
    """The page says so. Once the name was there, the next look is asked again."""
    for _ in range(5):
        assert not os.path.exists(kv / "block")
    until_counted(mount, kv, misses=1)
    _renamed(kv)
    os.unlink(kv / "block")
    assert not os.path.exists(kv / "block")
    until_counted(mount, kv, misses=2)


def test_temporary_names_and_made_directories_are_no_misses(mount: Mounted, kv: Path) -> None:
    assert not os.path.exists(kv / "block.tmp")
    (kv / "directory").mkdir()
    os.symlink("nowhere", kv / "symlink")
    compute()
    until_counted(mount, kv, misses=0)


def test_without_the_kernels_memory_each_look_counts() -> None:
    with mounted_with({"negative_timeout_s": 0}) as mount:
        kv = mount.path / "kv"
        kv.mkdir()
        for _ in range(5):
            assert not os.path.exists(kv / "block")
        until_counted(mount, kv, misses=5)
        assert mount.status()["cache"]["hit_rate"] == 0


def test_directories_beyond_the_limit_share_one_line() -> None:
    with mounted_with({"cache_directories_max": 2}) as mount:
        write_file(mount.path / "in-the-root", b"1")
        for name in ("a", "b", "c"):
            (mount.path / name).mkdir()
            write_file(mount.path / name / f"{name}@1@0@hash.data", b"1")
        directories = mount.status()["cache"]["directories"]
        assert set(directories) == {"/", "a", "/others"}
        assert directories["/others"]["stored_blocks"] == 2
        models = mount.status()["cache"]["models"]
        assert {name: each["stored_blocks"] for name, each in models.items()} == {
            "a": 1,
            "b": 1,
            "/others": 1,
        }
        (mount.path / "a" / "a@1@0@hash.data").unlink()
        (mount.path / "a").rmdir()
        assert "a" not in mount.status()["cache"]["directories"]
        assert mount.status()["cache"]["stored_blocks"] == 4


def test_evictions_are_counted_by_reason(mount: Mounted, kv: Path) -> None:
    before = mount.status()["cache"]["evicted"]
    client = CacheClient(kv)
    client.store("block")
    assert set(before) == {reason.value for reason in Reason}
    run_kvfs("evict", str(kv / "block"))
    after = mount.status()["cache"]["evicted"]
    assert after["command"]["blocks"] == before["command"]["blocks"] + 1
    assert after["command"]["bytes"] == before["command"]["bytes"] + 4096
    assert counted(mount, kv)["evicted_blocks"] == 1


def test_status_shows_a_line_for_each_directory(mount: Mounted, kv: Path) -> None:
    client = CacheClient(kv)
    client.store("model@1@0@hash.data")
    assert client.load("model@1@0@hash.data")
    printed = run_kvfs("status", str(mount.path)).stdout
    lines = [line.split() for line in printed.splitlines()]
    assert [kv.name, "100.0", "%", "1", "0", "4", "KiB", "4", "KiB", "0", "B"] in lines
    assert any(line[:3] == ["model", "100.0", "%"] for line in lines)


def test_status_shows_what_each_model_holds(mount: Mounted, kv: Path) -> None:
    folder = kv / "gemma_0123456789ab_r0" / "123" / "45_g0"
    folder.mkdir(parents=True)
    CacheClient(folder).store("0.bin")
    CacheClient(kv).store("llama@1@0@hash.data")
    told = mount.status()
    held = {"blocks": 1, "bytes": 4096}
    assert told["held_by"]["vllm gemma_0123456789ab"] == held
    assert told["held_by"]["lmcache llama"] == held
    assert told["cache"]["models"]["gemma_0123456789ab"]["stored_blocks"] == 1
    assert sum(row["blocks"] for row in told["held_by"].values()) == told["blocks"]
    printed = run_kvfs("status", str(mount.path)).stdout
    assert "vllm gemma_0123456789ab: blocks 1, 4 KiB" in printed


def test_the_curve_tells_a_pool_that_is_too_small() -> None:
    """A loop over twice as many blocks as fit has no hit, and would have nearly all at 4 times."""
    with mounted_with({}, "--capacity=8M") as mount:
        client = CacheClient(mount.path / "kv", content=b"x" * (64 << 10))
        client.directory.mkdir()
        for _ in range(5):
            for number in range(256):
                if not client.load(f"block-{number}"):
                    client.store(f"block-{number}")
        until_counted(mount, client.directory, misses=client.misses, hits=client.hits)
        cache = mount.status()["cache"]
        rates = {point["factor"]: point["hit_rate"] for point in cache["curve"]}
        assert client.hit_rate < 0.1
        assert rates[0.5] < 0.1 > rates[1]
        assert rates[4] > 0.7
        assert cache["curve"][0]["capacity_bytes"] == 2 << 20
        assert cache["evicted"]["space"]["blocks"] > 1000
        assert cache["age_at_eviction"]["p90_s"] is not None
        assert cache["missed_after_eviction"]["p10_s"] < 60
        printed = run_kvfs("status", str(mount.path)).stdout
        assert "Hit rate at other sizes" in printed
        assert any(
            line.split()[:2] == ["4", "x"] and "####" in line for line in printed.splitlines()
        )
