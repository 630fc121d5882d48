"""The operator's cleaner that `kvfs replay` and measure_full run beside an XFS."""

import os
from pathlib import Path

import pytest

from kvfs.bench.crew import Workers, hear, tell
from kvfs.bench.replay import cleaner
from kvfs.core.errors import BenchFailed


def old(path: Path, atime_s: int, mtime_s: int) -> None:
    """Make a file that was last used and written then."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"x")
    os.utime(path, (atime_s, mtime_s))


@pytest.fixture
def three_tenths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file takes three tenths of the room."""

    def taken(directory: str, room_bytes: int) -> float:
        return 0.3 * sum(len(files) for _, _, files in os.walk(directory))

    monkeypatch.setattr(cleaner, "taken", taken)


def left(tmp_path: Path) -> list[str]:
    """Name the files that stayed."""
    return sorted(path.name for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.usefixtures("three_tenths")
@pytest.mark.parametrize(("by", "stay"), [("atime", ["b", "c"]), ("mtime", ["a", "b"])])
def test_the_oldest_go_first_and_no_more_than_must(
    tmp_path: Path, by: str, stay: list[str]
) -> None:
    for name, (atime_s, mtime_s) in {"a": (1, 3), "b": (2, 2), "deep/c": (3, 1)}.items():
        old(tmp_path / name, atime_s, mtime_s)
    assert cleaner.clean_if_full(str(tmp_path), 1, 0.95, 0.7, by) == 0
    assert cleaner.clean_if_full(str(tmp_path), 1, 0.8, 0.7, by) == 1
    assert left(tmp_path) == stay


@pytest.mark.usefixtures("three_tenths")
def test_a_file_that_is_being_written_stays(tmp_path: Path) -> None:
    old(tmp_path / "oldest.tmp", 1, 1)
    old(tmp_path / "old", 2, 2)
    assert cleaner.clean(str(tmp_path), 1, 0.1, "mtime") == 1
    assert left(tmp_path) == ["oldest.tmp"]


def test_what_is_taken_is_what_is_not_free(tmp_path: Path) -> None:
    totals = os.statvfs(tmp_path)
    room_bytes = totals.f_bavail * totals.f_frsize
    # Others may write to the same file system meanwhile.
    assert cleaner.taken(str(tmp_path), room_bytes) == pytest.approx(0, abs=0.1)
    assert cleaner.taken(str(tmp_path), 2 * room_bytes) == pytest.approx(0.5, abs=0.1)


def test_it_looks_when_it_is_told_and_says_what_went(tmp_path: Path) -> None:
    old(tmp_path / "only", 1, 1)
    # More room than the file system has: all of it seems taken.
    where = (str(tmp_path), str(1 << 62), "0.9", "0.8", "atime", "-")
    with Workers(1, "kvfs.bench.replay.cleaner", *where) as workers:
        (script,) = workers.processes
        for went in (1, 0):
            tell(script, {})
            reply = hear(script, "cleaning")
            assert reply["deleted"] == went
            assert reply["cpu_ns"] > 0
        (tmp_path).rmdir()
        tell(script, {})
        with pytest.raises(BenchFailed, match=r"^cleaning: .*No such file"):
            hear(script, "cleaning")
