"""``kvfs demo`` ends well where every byte is right, and only there; it leaves nothing behind."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.bench.overfill import Overfilled
from kvfs.cli.demo_overfill import OverfilledSide, ServerStory, in_words
from kvfs.cli.main import main
from kvfs.core.errors import SourceForeign, UsageError, VerifyFailed
from tests.support.mounts.mounting import (
    COMMAND_WAIT_S,
    KVFS,
    ROOT,
    run_kvfs,
    skip_without_mounts,
    workplace,
)

FEW = ("--bytes", "24M")


@pytest.fixture
def place() -> Iterator[Path]:
    with workplace() as directory:
        yield directory


def flip_one_byte(folder: Path) -> tuple[Path, int]:
    """Change one byte in the middle of the largest block; return where."""
    block = max(folder.rglob("*.data"), key=lambda path: path.stat().st_size)
    offset_bytes = block.stat().st_size // 2
    with block.open("r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, offset_bytes)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 0x80]), offset_bytes)
    return block, offset_bytes


def assert_one_wrong_byte_is_reported(directory: Path) -> None:
    """Store with one process, change a byte, and let another process load."""
    run_kvfs("demo", "--on", str(directory), "--keep", *FEW)
    block, offset_bytes = flip_one_byte(directory)
    done = run_kvfs("demo", "--on", str(directory), "--stored", "--json", *FEW, check=False)
    assert done.returncode == VerifyFailed.exit_code
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert f"{block}: wrong byte at offset {offset_bytes}: " in line


def test_demo_counts_what_it_did(place: Path) -> None:
    done = run_kvfs("demo", "--on", str(place), "--json", *FEW)
    total = json.loads(done.stdout)["total"]
    assert total["stored_bytes"] > 20 << 20
    assert total["verified_bytes"] == total["loaded_bytes"] >= total["stored_bytes"]
    assert total["hits"] >= total["blocks"]
    assert total["misses"] >= total["blocks"]
    assert os.listdir(place) == []


def test_demo_says_what_it_did(place: Path) -> None:
    done = run_kvfs("demo", "--on", str(place), *FEW)
    assert "every byte is as stored" in done.stdout
    assert "DeepSeek-V3" in done.stdout
    assert done.stderr == ""  # no bar where nobody looks


def test_one_wrong_byte_fails_the_demo(place: Path) -> None:
    assert_one_wrong_byte_is_reported(place)


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_demo_takes_no_folder_that_it_did_not_make(place: Path, kind: str) -> None:
    folder, elsewhere = place / "kvfs-demo", place / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis.tex").write_text("years of work")
    if kind == "directory":
        elsewhere.rename(folder)
    elif kind == "file":
        folder.write_text("years of work")
    else:
        folder.symlink_to(elsewhere)
    before = sorted(path for path in place.rglob("*"))
    done = run_kvfs("demo", "--on", str(place), *FEW, check=False)
    assert done.returncode == UsageError.exit_code
    assert done.stderr == f"kvfs: {folder} exists; load it with --stored, or remove it\n"
    assert sorted(path for path in place.rglob("*")) == before


@pytest.mark.needs_fuse
def test_one_wrong_byte_on_a_mount_fails_the_demo(kv: Path) -> None:
    assert_one_wrong_byte_is_reported(kv)


@pytest.mark.needs_fuse
def test_demo_makes_and_removes_its_pool(place: Path) -> None:
    pool = place / "pool"
    pool.mkdir()
    done = run_kvfs("demo", "--source", str(pool), "--load-only", "--json", *FEW)
    total = json.loads(done.stdout)["total"]
    assert total["verified_bytes"] == total["loaded_bytes"] >= total["stored_bytes"] > 0
    assert not pool.exists() or os.listdir(pool) == []


@pytest.mark.needs_fuse
@pytest.mark.needs_loop
def test_the_demo_shows_what_a_plain_directory_does(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run on both: a pool that is filled over and over, its server killed, and an XFS."""
    skip_without_mounts()
    monkeypatch.setattr("kvfs.cli.demo_pool.PLACES", (str(place),))
    assert main(["demo", "--json", "--bytes", "24M"]) == 0
    told = json.loads(capsys.readouterr().out)
    for way in ("stored", "loaded", "direct"):
        assert told["total"]["to_plain"][way] > 0
    kvfs, xfs, cleaned = told["overfilled"]["sides"]
    assert (kvfs["name"], kvfs["refused"], kvfs["halves_left"]) == ("kvfs", 0, 0)
    assert xfs["refused"] > 0 < xfs["halves_left"] > xfs["halves_final"] > 0
    assert cleaned["deleted"] > 0 < cleaned["halves_left"]
    assert kvfs["found"] / kvfs["asked"] > xfs["found"] / xfs["asked"]
    story = told["overfilled"]["server"]
    if not story["why_not"]:
        assert story["killed"]
        assert story["upgraded"]
        assert story["longest_pause_s"] > 0
    assert os.listdir(place) == []
    assert str(place) not in Path("/proc/mounts").read_text()


SIDES = [
    OverfilledSide("kvfs", Overfilled(stored=700, asked=100, found=80), 5.0, 0, 0, None, 3.0),
    OverfilledSide(
        "XFS", Overfilled(stored=100, refused=600, asked=100, found=50), 5.0, 4, 2, None, 1.0
    ),
    OverfilledSide(
        "XFS and a script", Overfilled(stored=700, asked=100, found=60, lost=7), 5.0, 4, 2, 90, 2.0
    ),
]


def test_the_story_is_told_in_words() -> None:
    told = list(in_words(SIDES, ServerStory(True, True, 0.25)))
    assert told == [
        "kvfs took 5.0 times what it has room for: no store was refused, no load was lost.",
        "Its server was killed and upgraded meanwhile, and no call failed. The longest wait of a "
        "call was 0.25 s.",
        "XFS: 600 of 700 stores got ENOSPC, no load was lost, and 50 % of what was asked for again "
        "was there, 80 % on kvfs.",
        "XFS and a script, which deleted 90 blocks: no store was refused, 7 loads found gone what "
        "a lookup had found, and 60 % of what was asked for again was there, 80 % on kvfs.",
        "4 writers were killed half-way: kvfs shows none of their blocks, XFS 4 halves, 2 of them "
        "under a final name, where a lookup finds it.",
    ]


def test_the_story_says_what_was_not_done() -> None:
    """An old kernel lets no server take over, and a machine may have no loop device."""
    told = list(in_words(SIDES[:1], ServerStory(False, False, None, "the kernel is too old")))
    assert told[1:] == [
        "Its server was not killed: the kernel is too old.",
        "4 writers were killed half-way: kvfs shows none of their blocks.",
    ]


@pytest.mark.needs_fuse
def test_demo_runs_no_code_of_the_directory_that_it_is_called_in(place: Path) -> None:
    (place / "trio.py").write_text("raise SystemExit(99)")
    pool = place / "pool"
    pool.mkdir()
    command = [*KVFS[:1], "-P", *KVFS[1:], "demo", "--source", str(pool), "--load-only", *FEW]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=place, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.needs_fuse
def test_demo_leaves_what_is_not_blank_alone(place: Path) -> None:
    (place / "precious").write_text("data")
    done = run_kvfs("demo", "--source", str(place), *FEW, check=False)
    assert done.returncode == SourceForeign.exit_code
    assert str(place) in done.stderr
    assert [path.read_text() for path in place.iterdir()] == ["data"]


def long_demo(pool: Path, stderr: int) -> "subprocess.Popen[str]":
    """Start a demo in a blank *pool* that would take a while."""
    pool.mkdir()
    command = [*KVFS, "demo", "--source", str(pool), "--bytes", "2G"]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=stderr)


@pytest.mark.needs_fuse
def test_a_terminated_demo_unmounts(place: Path) -> None:
    pool = place / "pool"
    with long_demo(pool, subprocess.DEVNULL) as demo:
        assert demo.stdout is not None
        line = next(line for line in demo.stdout if line.startswith("Blocks go to "))
        folder = Path(line.removeprefix("Blocks go to ").strip())
        demo.send_signal(signal.SIGTERM)
        demo.stdout.read()
        assert demo.wait(COMMAND_WAIT_S) == 128 + signal.SIGTERM
    assert not folder.parent.exists()
    assert not pool.exists() or os.listdir(pool) == []


@pytest.mark.needs_fuse
@pytest.mark.parametrize("step", ["$ kvfs mkfs", "$ kvfs mount", "Data path:"])
def test_a_demo_that_is_terminated_on_its_way_leaves_nothing(place: Path, step: str) -> None:
    pool = place / "pool"
    with long_demo(pool, subprocess.PIPE) as demo:
        assert demo.stdout is not None
        shown = ""
        while not shown.startswith(step):
            shown = demo.stdout.readline()
        demo.send_signal(signal.SIGTERM)
        _, said = demo.communicate(timeout=COMMAND_WAIT_S)
    assert demo.returncode == 128 + signal.SIGTERM
    assert said.endswith("kvfs: terminated\n")
    if "mount" in step:
        assert not Path(shown.split()[-1]).parent.exists()
    assert os.listdir(pool) == []


@pytest.mark.needs_fuse
@pytest.mark.parametrize("step", ["$ kvfs umount", "$ kvfs destroy"])
def test_a_demo_that_is_interrupted_while_it_cleans_up_leaves_nothing(
    place: Path, step: str
) -> None:
    """Ctrl-C reaches the command that it runs, too; and who sees no end presses it again."""
    pool = place / "pool"
    pool.mkdir()
    command = [*KVFS, "demo", "--source", str(pool), "--load-only", *FEW]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as demo:
        assert demo.stdout is not None
        folder = Path("/")
        for line in demo.stdout:
            if line.startswith("Blocks go to "):
                folder = Path(line.removeprefix("Blocks go to ").strip())
            if line.startswith(step):
                break
        os.killpg(demo.pid, signal.SIGINT)
        for line in demo.stdout:
            if line.startswith("$ kvfs destroy"):
                os.killpg(demo.pid, signal.SIGINT)
        demo.communicate(timeout=COMMAND_WAIT_S)
    assert demo.returncode == 128 + signal.SIGINT
    assert not folder.parent.parent.exists()
    assert os.listdir(pool) == []


@pytest.mark.parametrize(
    "flags",
    [
        ("--stored",),
        ("--on", "/nonexistent"),
        ("--on", "/" + 300 * "x"),
        ("--bytes", "many"),
        ("--seed", "-1"),
    ],
)
def test_flags_that_make_no_sense(flags: tuple[str, ...]) -> None:
    done = run_kvfs("demo", *flags, check=False)
    assert done.returncode == UsageError.exit_code
    assert len(done.stderr.splitlines()) == 1
