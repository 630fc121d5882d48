"""``kvfs debug``: what a report needs, no bytes of blocks, and no names where that was asked."""

import json
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.cli import debug
from kvfs.core.errors import NotMounted, UsageError
from tests.support.mounts.mounting import Mounted, run_kvfs, skip_without_mounts
from tests.support.mounts.places import blank_place, small_mount

pytestmark = [pytest.mark.needs_fuse, pytest.mark.one_data_path]

BLOCK = f"meta-llama-SEP-Llama-3.1-8B@8@0@{'2f6c1a90' * 8}@bfloat16.pt"
DIRECTORY = "tenant-with-a-name"
CONTENT = b"BYTES OF A BLOCK"


@pytest.fixture(scope="module")
def pool() -> Iterator[Mounted]:
    skip_without_mounts()
    with blank_place() as place, small_mount(place) as mounted:
        (mounted.path / DIRECTORY).mkdir()
        for name in (BLOCK, f"{DIRECTORY}/{BLOCK}"):
            (mounted.path / "x.tmp").write_bytes(CONTENT * 8192)
            (mounted.path / "x.tmp").rename(mounted.path / name)
            (mounted.path / name).read_bytes()
        with mounted.log_file.open("a") as log:  # as a message about a block has it
            log.write(f"2026-01-01 00:00:00,000 INFO kvfs: torn: {DIRECTORY}/{BLOCK}\n")
        yield mounted


def collected(output: Path, *arguments: str | Path) -> dict[str, str]:
    """Run the command and return the parts by name."""
    run_kvfs("debug", *map(str, arguments), "--output", str(output))
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    parts: dict[str, str] = {}
    with tarfile.open(output) as bundle:
        for member in bundle:
            file = bundle.extractfile(member)
            assert file is not None
            raw = file.read()
            assert CONTENT not in raw
            parts[member.name.removeprefix("kvfs-debug/")] = raw.decode()
    return parts


def test_it_holds_what_a_report_needs(pool: Mounted, tmp_path: Path) -> None:
    parts = collected(tmp_path / "a.tar.gz", pool.path)
    name = next(name for name in parts if name.endswith("/status.json")).partition("/")[0]
    status = json.loads(parts[f"{name}/status.json"])
    assert status["mountpoint"] == str(pool.path)
    assert json.loads(parts[f"{name}/doctor.json"])["mountpoint"] == str(pool.path)
    assert BLOCK in parts[f"{name}/log.txt"]
    assert "Max open files" in parts[f"{name}/process.txt"]
    assert f" {pool.path} " in parts["mounts.txt"]
    assert parts["versions.txt"].startswith("kvfs ")
    assert {
        "kernel.txt",
        "journal.txt",
        "drives.txt",
        "memory.txt",
        f"{name}/settings.toml",
    } <= set(parts)


def test_names_are_digests_if_that_was_asked(pool: Mounted, tmp_path: Path) -> None:
    parts = collected(tmp_path / "b.tar.gz", pool.path, "--hash-names")
    for name, text in parts.items():
        for secret in (BLOCK, "Llama", "2f6c1a90", DIRECTORY):
            assert secret not in text, name
    (log,) = (text for name, text in parts.items() if name.endswith("log.txt"))
    assert "INFO kvfs: torn: name-" in log


def test_nothing_is_overwritten_and_a_wrong_mount_is_told(pool: Mounted, tmp_path: Path) -> None:
    there = tmp_path / "c.tar.gz"
    there.write_bytes(b"mine")
    done = run_kvfs("debug", str(pool.path), "--output", str(there), check=False)
    assert (done.returncode, there.read_bytes()) == (UsageError.exit_code, b"mine")
    done = run_kvfs("debug", "/", "--output", str(tmp_path / "d"), check=False)
    assert done.returncode == NotMounted.exit_code
    assert sorted(os.listdir(tmp_path)) == ["c.tar.gz"]


def test_a_dead_server_is_collected_too(tmp_path: Path) -> None:
    skip_without_mounts()
    with blank_place() as place, small_mount(place) as mounted:
        mounted.kill()
        parts = collected(tmp_path / "e.tar.gz", mounted.path)
        (status,) = (text for name, text in parts.items() if name.endswith("/status.json"))
        assert "dead" in status


def test_of_a_long_part_the_end_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug, "_PART_MAX_BYTES", 10)
    (tmp_path / "log").write_text("begin" * 1000 + "the end")
    assert debug._file(str(tmp_path / "log")) == "ginthe end"
    assert debug._made(debug.Part("log", lambda: "begin" * 1000 + "the end")) == "ginthe end"


def test_a_program_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug, "_COMMAND_MAX_S", 0.1)
    assert "timed out after 0.1 seconds" in debug._run("sleep", "60")
