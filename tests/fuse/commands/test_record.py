"""``kvfs record`` on a real mount: what was used, in order, and what pools would find of it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from kvfs.bench.replay.trace import Request
from kvfs.bench.simulate.found import best_possible
from kvfs.bench.simulate.loads import recording_at
from kvfs.bench.simulate.served import policy_for, served
from kvfs.cli.arguments import OnMount, locate
from kvfs.cli.record import Recorder
from kvfs.client.control_socket import REPLY_MAX_BYTES, ask
from kvfs.core.checksum import crc32c
from kvfs.core.errors import CommandError, NotMounted, NotRoot, UsageError
from kvfs.pool.figures.touch_recordings import KeyedNames
from mount.control.verbs import BLOCKS_A_REPLY
from tests.fuse.conftest import NOBODY
from tests.support.clients.cache_client import CacheClient
from tests.support.clients.stepping import until
from tests.support.forks.process import Process
from tests.support.mounts.mounting import KVFS, ROOT, Mounted, run_kvfs, skip_without_mounts
from tests.support.mounts.places import blank_place, small_mount
from tests.support.rules.documented import of

pytestmark = pytest.mark.needs_fuse

KEY: Final = "00112233445566778899aabbccddeeff"
BLOCK_BYTES: Final = 1 << 16
#: What is stored (and then loaded, if it is there), a row for each time that the recorder asks.
BATCHES: Final = ("abcdef", "fedc", "ag", "gab", "hijab", "", "cdef", "jihgfedcba", "klm", "abcm")


class Load:
    """A client that stores what it does not find, and what it used, by number."""

    def __init__(self, directory: Path, size_bytes: int = BLOCK_BYTES) -> None:
        self._client = CacheClient(directory, content=b"x" * size_bytes)
        self._parent = directory.stat().st_ino

    def use(self, names: Sequence[str]) -> list[int]:
        """Load or store each of *names*; return what stands for them, first to last."""
        for name in names:
            if not self._client.load(name):
                self._client.store(name)
        hashes = [crc32c(name.encode(), self._parent & 0xFFFFFFFF) for name in names]
        return list(map(int, KeyedNames(bytes.fromhex(KEY)).numbers(np.array(hashes, np.uint32))))


@pytest.fixture(scope="module", params=["true", "false"], ids=["compiled", "python"])
def recorded_mount(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A mount for each reader of requests."""
    skip_without_mounts()
    reader = f"compiled_reader={request.param}"
    with blank_place() as place, small_mount(place, "--set", reader) as mount:
        yield mount
        mount.stop()
        assert mount.errors() == []


@pytest.fixture
def load(recorded_mount: Mounted, request: pytest.FixtureRequest) -> Load:
    directory = recorded_mount.path / str(request.node.originalname)
    directory.mkdir()
    return Load(directory)


@pytest.fixture
def where(recorded_mount: Mounted) -> OnMount:
    return locate([str(recorded_mount.path)])


def begun(where: OnMount) -> int:
    """Begin a recording with KEY, and return its number."""
    number: int = ask(where.socket, "record", {"key": KEY})["recording"]
    return number


def told(where: OnMount, number: int, *, end: bool = False) -> list[int]:
    """Return what was used since the last call."""
    answer = ask(where.socket, "recorded", {"recording": number, "end": end})
    assert (answer["lost"], answer["more"]) == (0, False)
    blocks: list[int] = answer["blocks"]
    return blocks


def test_what_is_used_is_told_in_its_order(where: OnMount, load: Load) -> None:
    load.use("before")
    number = begun(where)
    for batch in BATCHES:
        assert load.use(batch) == told(where, number), batch
    assert told(where, number, end=True) == []
    assert ask(where.socket, "recorded", {"recording": number}) == {"gone": True}


def test_what_is_used_twice_counts_once_and_last(where: OnMount, load: Load) -> None:
    number = begun(where)
    a, b = load.use("ab")
    load.use("a")
    assert told(where, number, end=True) == [b, a]


@pytest.mark.parametrize("policy", [b"close", b"rename"])
def test_a_block_is_told_once_it_is_stored(
    policy: bytes, where: OnMount, recorded_mount: Mounted
) -> None:
    """Also if its close came before the last look: where only a rename publishes, none follows."""
    directory = recorded_mount.path / f"by-{policy.decode()}"
    directory.mkdir()
    os.setxattr(directory, "user.kvfs.publish", policy)
    number = begun(where)
    (directory / "z.tmp").write_bytes(b"x" * BLOCK_BYTES)
    ask(where.socket, "sync")  # else the close waits a moment for the rename
    assert told(where, number) == []
    (directory / "z.tmp").rename(directory / "z")
    stored = told(where, number)
    assert told(where, number) == []
    assert Load(directory).use("z") == stored
    assert told(where, number, end=True) == stored


def test_what_goes_before_it_is_told_is_told(where: OnMount, load: Load) -> None:
    number = begun(where)
    a, b = load.use("ab")
    run_kvfs("evict", f"{where.mountpoint}/test_what_goes_before_it_is_told_is_told/a")
    (c,) = load.use("c")
    assert told(where, number, end=True) == [a, b, c]


def recorded(where: OnMount, load: Load, path: Path) -> list[int]:
    """Record BATCHES in the file *path*; return what was used in all."""
    used: list[int] = []
    with path.open("w") as file:
        recorder = Recorder(where, lambda line: print(json.dumps(line), file=file))
        for batch in BATCHES:
            used += load.use(batch)
            recorder.write_new()
        recorder.write_new(is_end=True)
    return used


def test_pools_find_of_a_recording_what_they_find_of_the_load_itself(
    where: OnMount, load: Load, tmp_path: Path
) -> None:
    used = recorded(where, load, tmp_path / "load.jsonl")
    recording = recording_at(str(tmp_path / "load.jsonl"))
    assert recording is not None
    assert len(recording.requests) == len(used)
    itself = [Request(float(at), 0, (block,)) for at, block in enumerate(used)]
    for room in (1, 3, 5, 8):
        outcomes = [
            [served(requests, policy_for(name, room), room)[:2] for name in ("lru", "adaptive")]
            + [best_possible(requests, room)[:2]]
            for requests in (itself, recording.requests)
        ]
        assert outcomes[0] == outcomes[1]
        assert outcomes[0][0] != outcomes[0][2]
    assert (recording.lost, recording.gaps_s) == (0, 0)


def test_a_recording_says_what_the_mount_counted(
    where: OnMount, load: Load, tmp_path: Path
) -> None:
    recorded(where, load, tmp_path / "load.jsonl")
    recording = recording_at(str(tmp_path / "load.jsonl"))
    assert recording is not None
    assert recording.block_bytes == BLOCK_BYTES
    room_bytes = int(
        json.loads((tmp_path / "load.jsonl").read_text().splitlines()[0])["for_blocks_bytes"]
    )
    assert recording.room == room_bytes // BLOCK_BYTES
    names = "".join(BATCHES)
    assert recording.hits == len(names) - len(set(names))


def test_many_blocks_are_told_in_several_lines(where: OnMount, recorded_mount: Mounted) -> None:
    directory, lines = recorded_mount.path / "many", list[dict[str, Any]]()
    directory.mkdir()
    load = Load(directory, size_bytes=1)
    recorder = Recorder(where, lines.append)
    load.use([str(number) for number in range(BLOCKS_A_REPLY + 3)])
    recorder.write_new(is_end=True)
    header, first, second = lines
    assert (len(first["blocks"]), len(second["blocks"])) == (BLOCKS_A_REPLY, 3)
    assert len(json.dumps(first)) < REPLY_MAX_BYTES
    assert len({*first["blocks"], *second["blocks"]}) > BLOCKS_A_REPLY
    assert first["misses"] + second["misses"] <= BLOCKS_A_REPLY + 3
    assert header["time"] <= first["time"] <= second["time"]


def test_the_next_server_goes_on_with_the_same_numbers(
    where: OnMount, recorded_mount: Mounted, load: Load
) -> None:
    lines: list[dict[str, Any]] = []
    recorder = Recorder(where, lines.append)
    load.use("a")
    recorder.write_new()
    run_kvfs("upgrade", str(recorded_mount.path))
    recorded_mount.adopt()
    recorder.write_new()
    load.use("ab")
    recorder.write_new(is_end=True)
    _, first, gap, second = lines
    assert gap["gap_s"] > 0
    assert gap["blocks"] == []
    assert second["blocks"][:1] == first["blocks"]
    assert len(second["blocks"]) == 2


def lines_in(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines that are there so far."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def uses_in(path: Path) -> list[int]:
    """Return what was used; a tick may come between the lookup and the open of one load."""
    blocks = [block for line in lines_in(path)[1:] for block in line["blocks"]]
    return [block for block, _ in groupby(blocks)]


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_the_command_records_until_it_is_stopped(
    stop: signal.Signals, recorded_mount: Mounted, tmp_path: Path
) -> None:
    directory, path = recorded_mount.path / f"stopped-{stop.name}", tmp_path / "load.jsonl"
    directory.mkdir()
    load = Load(directory)
    command = [*KVFS, "record", str(recorded_mount.path), "-o", str(path)]
    with Process(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as recording:
        assert recording.stderr is not None
        until(lambda: bool(lines_in(path)), "it has begun")
        load.use("abcdef")
        until(lambda: len(set(uses_in(path))) == 6, "all stores are told")
        load.use("cab")
        recording.send_signal(stop)
        said = recording.stderr.read()
    assert recording.returncode == 0, said
    a, b, c = uses_in(path)[:3]
    assert uses_in(path)[6:] == [c, a, b]
    header = lines_in(path)[0]
    assert header["kvfs_recording"] == 1
    assert header["name"] == recorded_mount.status()["name"]
    assert header["capacity_bytes"] == recorded_mount.status()["capacity_bytes"]
    assert "uses of blocks" in said
    shown = run_kvfs("simulate", str(path), "--blocks-share", "50%").stdout
    assert "of 6 blocks of 64 KiB" in shown
    assert "(now)" in shown


@pytest.mark.parametrize("command", of("docs/simulate.md", "kvfs record "))
def test_the_commands_of_the_page(command: str, recorded_mount: Mounted, tmp_path: Path) -> None:
    """For a moment, on this mount."""
    assert " /kv " in command
    words = command.replace(" /kv ", f" {recorded_mount.path} ").split()
    words = [str(tmp_path / word) if word.endswith(".jsonl") else word for word in words]
    done = run_kvfs(*words[1:], *("--seconds", "0.01"))
    assert "0 uses of blocks" in done.stderr
    assert len(lines_in(tmp_path / "load.jsonl")) <= 2


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (("{place}",), NotMounted, "is not on a kvfs mount"),
        (("{mount}/below",), UsageError, "give {mount}"),
        (("{mount}", "-o", "/missing/x"), UsageError, "/missing/x: No such file"),
        (("{mount}", "-o", "/dev/full"), CommandError, "cannot write /dev/full: No space left"),
        (("{mount}", "--seconds", "0"), UsageError, "--seconds must be greater than 0"),
        (("{mount}", "--seconds", "soon"), UsageError, "'soon' is not a number"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: tuple[str, ...],
    error: type[CommandError],
    said: str,
    recorded_mount: Mounted,
    tmp_path: Path,
) -> None:
    (recorded_mount.path / "below").mkdir(exist_ok=True)
    words = [one.format(place=tmp_path, mount=recorded_mount.path) for one in arguments]
    done = run_kvfs("record", *words, check=False)
    assert done.returncode == error.exit_code, done.stderr
    (line,) = done.stderr.splitlines()
    assert said.format(mount=recorded_mount.path) in line


def test_it_is_for_root(recorded_mount: Mounted, tmp_path: Path) -> None:
    program = (
        "import os, sys; import kvfs.cli.main, kvfs.cli.record;"
        f"os.setresuid({NOBODY}, {NOBODY}, {NOBODY});"
        f"sys.exit(kvfs.cli.main.main(['record', {str(recorded_mount.path)!r}, '-o', '-']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == NotRoot.exit_code, done.stderr
    assert done.stdout == ""


def test_a_read_only_mount_knows_no_uses() -> None:
    skip_without_mounts()
    with blank_place() as place:
        with small_mount(place) as mount:
            mount.stop()
        with small_mount(place, "-o", "ro") as mount:
            done = run_kvfs("record", str(mount.path), "-o", os.devnull, check=False)
    assert done.returncode == UsageError.exit_code
    assert "read-only" in done.stderr


def test_wrong_requests_are_refused(where: OnMount) -> None:
    for key in (None, "", "xyz", 7, ["00"]):
        with pytest.raises(UsageError, match="key: must be bytes in hex"):
            ask(where.socket, "record", {"key": key})
    for number in (None, -1, "1", [1]):
        assert ask(where.socket, "recorded", {"recording": number}) == {"gone": True}
