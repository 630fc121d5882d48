"""The policy ttl of a directory: blocks unused for longer go by themselves, and no others."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients.stepping import until
from tests.support.mounts.mounting import Mounted, run_kvfs, skip_without_mounts
from tests.support.mounts.places import blank_place, small_mount

pytestmark = [pytest.mark.needs_fuse, pytest.mark.one_data_path]

TTL = "user.kvfs.ttl"


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    skip_without_mounts()
    with blank_place() as place:
        yield place


def store(directory: Path, *names: str) -> list[Path]:
    directory.mkdir(exist_ok=True)
    for name in names:
        (directory / "x.tmp").write_bytes(bytes(70 << 10))
        (directory / "x.tmp").rename(directory / name)
    return [directory / name for name in names]


def test_what_is_unused_for_longer_goes_and_nothing_else(place: Path) -> None:
    """[life-ttl] By a directory's attribute, below it, and not what is used, pinned or open."""
    with small_mount(place) as mounted:
        kv = mounted.path
        kept = store(kv / "keep", "a", "b")
        short = kv / "short"
        cold, used, opened, pinned = store(short, "cold", "used", "opened", "pinned")
        (excepted,) = store(short / "deep", "excepted")
        os.setxattr(short / "deep", TTL, b"none")
        (longer,) = store(kv / "longer", "block")
        os.setxattr(kv / "longer", TTL, b"1h")
        run_kvfs("pin", str(pinned))
        leased = short / "leased"
        leased.write_bytes(b"mine while this process lives")
        with opened.open("rb"):
            os.setxattr(short, TTL, b"1.5s")

            def is_gone() -> bool:
                used.read_bytes()
                return not cold.exists()

            until(is_gone, "the cold block has expired")
            evicted = mounted.status()["cache"]["evicted"]["ttl"]
            assert evicted["blocks"] == 1
            assert opened.exists()
        until(lambda: not opened.exists(), "closed, it expires too")
        until(lambda: not used.exists(), "so does one that is used no more")
        assert all(path.exists() for path in (*kept, pinned, leased, excepted, longer))
        assert os.getxattr(short, TTL) == b"1.5s"
        assert os.getxattr(kv, TTL) == b"none"
        leased.unlink()
        mounted.stop()
        assert mounted.errors() == []


def test_a_ttl_survives_a_restart_and_the_settings_file_has_it(place: Path) -> None:
    settings = place / "kv.toml"
    settings.write_text('[policies."/listed"]\nttl = "1s"\n')
    with Mounted(place / "pool", place / "kv", "--config", str(settings)) as mounted:
        (listed,) = store(mounted.path / "listed", "block")
        (other,) = store(mounted.path / "other", "block")
        until(lambda: not listed.exists(), "the settings' ttl has passed")
        assert other.exists()
        os.setxattr(mounted.path / "other", TTL, b"2s")
        store(mounted.path / "other", "block")
        mounted.stop()
    with Mounted(place / "pool", place / "kv") as mounted:
        until(lambda: not (mounted.path / "other" / "block").exists(), "the attribute's has")
        assert os.getxattr(mounted.path / "other", TTL) == b"2s"


@pytest.mark.parametrize("value", [b"", b"soon", b"0s", b"-1d", b"1", b"\xff"])
def test_a_ttl_that_is_none_is_refused(place: Path, value: bytes) -> None:
    with small_mount(place) as mounted:
        with pytest.raises(OSError, match="Invalid argument"):
            os.setxattr(mounted.path, TTL, value)
        block = mounted.path / "block"
        block.touch()
        with pytest.raises(OSError, match="Invalid argument"):
            os.setxattr(block, TTL, b"1d")
        block.unlink()


def test_a_wrong_ttl_in_the_settings_file_is_one_line(place: Path) -> None:
    settings = place / "wrong.toml"
    settings.write_text('[policies."/a"]\nttl = "soon"\n')
    done = run_kvfs(
        "mount", str(place / "pool"), str(place / "kv"), "--config", str(settings), check=False
    )
    assert (done.returncode, "'soon' is not an age" in done.stderr) == (2, True)
