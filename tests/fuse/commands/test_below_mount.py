"""What clients stored below the mountpoint while kvfs was down is told of, with its size."""

import itertools
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvfs.core import errors
from kvfs.doctor import below_mount
from kvfs.doctor.below_mount import below, told
from kvfs.doctor.facts import Below
from tests.support.mounts.mounting import mounted_at, run_kvfs, skip_without_mounts
from tests.support.mounts.places import blank_place, small_mount

pytestmark = pytest.mark.needs_fuse
MIB = 1 << 20


@pytest.fixture
def place() -> Iterator[Path]:
    skip_without_mounts()
    with blank_place() as directory:
        yield directory


def store_below(mountpoint: Path) -> None:
    (mountpoint / "model").mkdir()
    (mountpoint / "model" / "a").write_bytes(bytes(2 * MIB))
    (mountpoint / "b").write_bytes(bytes(MIB))


def said_by_doctor(mountpoint: Path) -> list[dict[str, Any]]:
    report = json.loads(run_kvfs("doctor", str(mountpoint), "--json", check=False).stdout)
    assert "below the mount" not in report["undecided"]
    return [one for one in report["findings"] if one["check"] == "below the mount"]


def test_mount_and_doctor_tell_of_what_the_mount_hides(place: Path) -> None:
    store_below(place / "kv")
    with small_mount(place) as mount:
        (mount.path / "stored").write_bytes(bytes(MIB))  # which is no part of it
        hidden = f"{mount.path} is not empty: 2 files of 3 MiB"
        assert hidden in mount.log_file.read_text()
        mount.stop()
        done = run_kvfs("mount", mount.source, str(mount.path))
        assert done.stderr.startswith(f"kvfs: {hidden}, stored while nothing was mounted there")
        (finding,) = said_by_doctor(mount.path)
        assert finding["severity"] == "warning"
        assert finding["problem"].startswith("3 MiB in 2 files are in the directory")
        # What it shows runs as shown, and looks below the mount.
        fix = finding["fix"].splitlines()[0]
        shown = subprocess.run(["sh", "-euc", fix], check=True, capture_output=True, text=True)
        assert shown.stderr == ""
        assert f"{MIB} " in shown.stdout
        assert "model" in shown.stdout
        assert "stored" not in shown.stdout
        run_kvfs("umount", str(mount.path))
        subprocess.run(["sh", "-euc", f"rm -r {mount.path}/*"], check=True)
        assert run_kvfs("mount", mount.source, str(mount.path)).stderr == ""
        assert said_by_doctor(mount.path) == []
        run_kvfs("umount", str(mount.path))
        mount.start()


def test_doctor_tells_of_it_while_nothing_is_mounted(place: Path) -> None:
    store_below(place / "kv")
    done = run_kvfs("doctor", str(place / "kv"), check=False)
    assert done.returncode == errors.NotMounted.exit_code
    assert f"{place / 'kv'}; the directory itself holds 2 files of 3 MiB" in done.stderr


def test_it_is_seen_below_a_dead_mount(place: Path) -> None:
    store_below(place / "kv")
    with small_mount(place) as mount:
        mount.kill()
        assert below(str(mount.path)) == Below(2, 3 * MIB, is_whole=True)
        said = run_kvfs("mount", mount.source, str(mount.path)).stderr
        assert "replaces a dead mount" in said
        assert "is not empty: 2 files of 3 MiB" in said
        run_kvfs("umount", str(mount.path))
        mount.start()


def test_the_look_has_a_bound(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        (place / "kv" / str(number)).write_bytes(bytes(4096))
    monkeypatch.setattr(below_mount, "_FILES_MAX", 3)
    found = below(str(place / "kv"))
    assert found == Below(3, 3 * 4096, is_whole=False)
    assert told(found) == "at least 3 files of 12 KiB"
    moments_s = itertools.count(0.0, 0.4)
    monkeypatch.setattr(below_mount, "time", SimpleNamespace(monotonic=lambda: next(moments_s)))
    assert below(str(place / "kv")) == Below(2, 2 * 4096, is_whole=False)


def test_what_is_mounted_in_it_is_not_counted_and_what_covers_it_not_guessed(place: Path) -> None:
    with mounted_at(place / "kv" / "inner", "-t", "tmpfs", "kvfs-test") as inner:
        (inner / "file").write_bytes(bytes(MIB))
        assert below(str(place / "kv")) == Below(0, 0, is_whole=True)
        assert told(below(str(place / "kv"))) == ""
        assert below(str(inner)) == Below(1, MIB, is_whole=True)
        with small_mount(place) as mount:
            mount.stop()
            run_kvfs("mount", mount.source, str(inner))
            try:
                assert below(str(inner)) is None
            finally:
                run_kvfs("umount", str(inner))
            mount.start()
