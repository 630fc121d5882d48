"""``kvfs evict``, ``pin`` and ``unpin`` on a real mount: what goes, what stays, what is said."""

import json
import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.cli.evict import age_of
from kvfs.client.control_socket import REPLY_MAX_BYTES, ask
from kvfs.core.errors import (
    CommandError,
    EvictedTooLittle,
    NotMounted,
    PathMissing,
    UsageError,
)
from kvfs.core.mount_name import name_of, socket_path
from tests.support.clients.stepping import until
from tests.support.mounts.mounting import Mounted, run_kvfs, skip_without_mounts
from tests.support.mounts.places import blank_place, small_mount

pytestmark = [pytest.mark.needs_fuse, pytest.mark.one_data_path]

BLOCK_BYTES = 1 << 20


@pytest.fixture(scope="module")
def pool() -> Iterator[Mounted]:
    """A small pool of its own: what is evicted here is nobody else's."""
    skip_without_mounts()
    with blank_place() as place, small_mount(place) as mounted:
        yield mounted
        mounted.stop()
        assert mounted.errors() == []


@pytest.fixture
def kv(pool: Mounted) -> Iterator[Path]:
    """An empty mount."""
    yield pool.path
    run_kvfs("unpin", "--all", str(pool.path))
    run_kvfs("evict", str(pool.path), check=False)
    for directory in pool.path.iterdir():
        directory.rmdir()


def store(directory: Path, count: int, size_bytes: int = BLOCK_BYTES) -> list[Path]:
    """Store blocks as connectors do, by a temporary name."""
    directory.mkdir(exist_ok=True)
    blocks = [directory / f"{number:03}.data" for number in range(count)]
    for block in blocks:
        draft = block.with_suffix(".tmp")
        draft.write_bytes(os.urandom(size_bytes))
        draft.rename(block)
    return blocks


def evict(*arguments: str | Path) -> dict[str, Any]:
    done = run_kvfs("evict", *map(str, arguments), "--json")
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


def fails(error: type[CommandError], *arguments: str | Path) -> str:
    done = run_kvfs(*map(str, arguments), check=False)
    assert done.returncode == error.exit_code, done.stderr
    (line,) = done.stderr.splitlines()
    return line


def test_evict_a_block_a_directory_and_all(kv: Path) -> None:
    first, second = store(kv / "a", 4), store(kv / "b", 3)
    assert evict(first[0])["blocks"] == 1
    assert not first[0].exists()
    done = evict(kv / "a")
    assert (done["blocks"], done["bytes"]) == (3, 3 * BLOCK_BYTES)
    assert [block.exists() for block in first + second] == [False] * 4 + [True] * 3
    assert evict(kv)["blocks"] == 3
    assert store(kv / "a", 4)[3].stat().st_size == BLOCK_BYTES


def test_a_dry_run_evicts_nothing(kv: Path) -> None:
    blocks = store(kv / "a", 3)
    done = run_kvfs("evict", str(kv), "--dry-run")
    assert done.stdout == "3 blocks, 3 MiB would be evicted\n"
    assert all(block.exists() for block in blocks)
    assert evict(kv / "a", kv, kv / "a", "--dry-run")["blocks"] == 3
    assert evict(kv, "--dry-run", "--bytes", "1.5M")["blocks"] == 2


def test_what_is_no_file_stays_and_the_server_goes_on(kv: Path) -> None:
    """A link or a fifo named itself, as by a shell's pattern; links are not followed."""
    (block,) = store(kv / "a", 1)
    (kv / "link").symlink_to("a")
    os.mkfifo(kv / "fifo")
    try:
        for path in (kv / "link", kv / "fifo"):
            assert f"nothing under {path} can be evicted" in fails(EvictedTooLittle, "evict", path)
        done = evict(kv / "link", kv / "fifo", kv / "a", "--dry-run")
        assert (done["blocks"], done["kept"]) == (1, {"not a file": 2})
        assert block.exists()
    finally:
        (kv / "link").unlink()
        (kv / "fifo").unlink()


@pytest.mark.parametrize("age", ["1e999", "-1e300", "1e300", "9.3e18", "NaN"])
def test_a_number_that_is_none_is_refused(pool: Mounted, age: str) -> None:
    """The command sends no such number; whoever else asks gets an answer, and the mount lives."""
    socket_of = socket_path(name_of(str(pool.path)))
    args = {"paths": [""], "unused_for_s": float(age), "dry_run": True}
    with pytest.raises(UsageError, match="out of range"):
        ask(socket_of, "evict", args)


def test_once_it_is_done_no_client_sees_the_names(kv: Path, pool: Mounted) -> None:
    """The kernel has forgotten what it knew of them: nobody finds a file and cannot open it."""
    blocks = store(kv / "many", 400, size_bytes=1)
    assert all(block.is_file() for block in blocks)
    control = socket_path(name_of(str(pool.path)))
    job = ask(control, "evict", {"paths": ["many"]})["job"]
    until(lambda: ask(control, "job", {"job": job})["done"], "all are evicted", pause_s=0)
    assert [block for block in blocks if block.is_file()] == []


def test_evict_what_the_policy_names(kv: Path) -> None:
    """Of the whole mount, as for a writer who needs the room."""
    blocks = store(kv / "a", 10)
    done = evict(kv, "--bytes", "4M")
    assert 4 <= done["blocks"] <= 5
    assert sum(block.exists() for block in blocks) == 10 - done["blocks"]
    line = fails(EvictedTooLittle, "evict", kv, "--bytes", "100M")
    assert f"nothing evicted: of 100 MiB only {10 - done['blocks']} MiB may go" in line
    assert sum(block.exists() for block in blocks) == 10 - done["blocks"]


def test_evict_so_many_bytes_and_no_more(kv: Path) -> None:
    """Only what lies below the paths, just enough, and a load keeps a block."""
    other, blocks = store(kv / "other", 2), store(kv / "a", 6)
    done = evict(kv / "a", "--bytes", "1.5M")
    assert (done["blocks"], done["found_blocks"]) == (2, 6)
    assert sum(block.exists() for block in blocks) == 4
    assert all(block.exists() for block in other)
    line = fails(EvictedTooLittle, "evict", kv / "a", "--bytes", "100M")
    assert "nothing evicted: of 100 MiB only 4 MiB may go" in line
    assert sum(block.exists() for block in blocks) == 4


def test_evict_by_age(kv: Path) -> None:
    old, fresh = store(kv / "a", 2)
    assert evict(kv, "--unused-for", "1s", "--dry-run")["blocks"] == 0
    # A change of times is a sign of life, too: to be old all three must be.
    os.utime(old, (1, 1))
    assert evict(kv, "--unused-for", "1h")["blocks"] == 0
    assert evict(kv, "--unused-for", "0s")["blocks"] == 2
    assert not fresh.exists()


def test_age_is_since_the_last_use(kv: Path) -> None:
    """A block that is read all the time is young, however long ago it was stored."""
    cold, hot = store(kv / "a", 2)

    def old() -> int:
        return int(evict(kv, "--unused-for", "2s", "--dry-run")["blocks"])

    until(lambda: old() == 2, "both are old")
    hot.read_bytes()
    assert evict(kv, "--unused-for", "2s")["blocks"] == 1
    assert (cold.exists(), hot.exists()) == (False, True)


def test_so_many_bytes_of_a_leased_pool(kv: Path) -> None:
    """Nothing may go, and the answer says what stays and why."""
    leased = [kv / f"leased-{number}" for number in range(3)]
    for block in leased:
        block.write_bytes(bytes(BLOCK_BYTES))
    (pinned,) = store(kv / "a", 1)
    run_kvfs("pin", str(pinned))
    done = run_kvfs("evict", str(kv), "--bytes", "100M", check=False)
    why = "leased 3 (3 MiB), pinned 1 (1 MiB)"
    assert done.returncode == EvictedTooLittle.exit_code
    assert done.stdout == f"0 blocks, 0 B evicted; 4 stay: {why}\n"
    assert (
        done.stderr
        == f"kvfs: evicted 0 B of 100 MiB: the rest is pinned, leased or in use ({why})\n"
    )
    answer = json.loads(run_kvfs("evict", str(kv), "--bytes=1M", "--json", check=False).stdout)
    assert answer["kept"] == {"leased": 3, "pinned": 1}
    assert answer["kept_bytes"] == {"leased": 3 * BLOCK_BYTES, "pinned": BLOCK_BYTES}
    for block in leased:
        block.unlink()


def test_as_many_pins_as_are_wanted(kv: Path) -> None:
    """All of them are listed, though no reply holds them; a pin that was set is a success."""
    long = f"a/{'b' * 250}/{'c' * 250}"
    names = [f"{number:0240}" for number in range(1600)]
    assert len(names) * len(f"{long}/{names[0]}") > REPLY_MAX_BYTES
    (kv / long).mkdir(parents=True)
    for name in names:
        (kv / long / name).mkdir()
        os.setxattr(kv / long / name, "user.kvfs.pin", b"1")
    (one,) = store(kv / "b", 1)
    done = json.loads(run_kvfs("pin", str(one), "--json").stdout)
    assert done["pins"] == {"/b/000.data": BLOCK_BYTES}
    listed = json.loads(run_kvfs("pin", "--list", str(kv), "--json").stdout)
    assert set(listed["pins"]) == {"/b/000.data", *(f"/{long}/{name}" for name in names)}
    run_kvfs("unpin", "--all", str(kv))
    shutil.rmtree(kv / "a")


def test_what_may_not_go_stays_and_is_told(kv: Path) -> None:
    leased = kv / "a" / "leased"
    pinned = store(kv / "pinned", 2)
    store(kv / "a", 1)
    leased.write_bytes(b"mine while this process lives")
    run_kvfs("pin", str(kv / "pinned"))
    with (kv / "a" / "draft").open("wb") as draft:
        draft.write(b"being written")
        draft.flush()
        done = evict(kv)
    assert done["blocks"] == 1
    assert done["kept"] == {"leased": 1, "pinned": 2, "draft": 1}
    assert leased.read_bytes().startswith(b"mine")
    assert all(block.exists() for block in pinned)
    assert f"nothing under {leased} can be evicted" in fails(EvictedTooLittle, "evict", leased)
    for path in (leased, kv / "a" / "draft"):
        path.unlink()


def test_a_reader_keeps_what_it_reads(kv: Path) -> None:
    """By path the name goes at once; by size an open or mapped block is left alone."""
    opened, mapped, idle = store(kv / "a", 3)
    content = opened.read_bytes()
    with opened.open("rb") as reader, mapped.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        file.close()
        assert evict(kv, "--bytes", "1M")["blocks"] == 1
        assert not idle.exists()
        assert evict(opened, mapped)["blocks"] == 2
        assert not opened.exists()
        assert reader.read() == content
        assert len(mapping[:]) == BLOCK_BYTES
        mapping.close()


def test_pins_of_files_and_directories(kv: Path) -> None:
    blocks = store(kv / "a", 4)
    shown = json.loads(run_kvfs("pin", str(kv / "a"), "--json").stdout)
    assert shown == {"pins": {"/a": 4 * BLOCK_BYTES}, "pinned_bytes": 4 * BLOCK_BYTES}
    assert os.getxattr(blocks[0], "user.kvfs.pin") == b"1"
    # One file of a pinned directory may go.
    run_kvfs("unpin", str(blocks[0]))
    assert evict(kv, "--dry-run")["blocks"] == 1
    run_kvfs("unpin", str(kv / "a"))
    run_kvfs("pin", str(blocks[1]), str(blocks[2]))
    assert evict(kv)["kept"] == {"pinned": 2}
    listed = run_kvfs("pin", "--list", str(kv)).stdout
    assert "/a/001.data" in listed
    assert "2 MiB  pinned" in listed
    run_kvfs("unpin", "--all", str(kv))
    assert json.loads(run_kvfs("pin", "--list", "--json", str(kv)).stdout)["pins"] == {}
    assert evict(kv)["blocks"] == 2


def test_names_do_not_steer_the_terminal(kv: Path) -> None:
    (kv / "a\n  9 GiB  b\x1b[2J").mkdir()
    run_kvfs("pin", *map(str, kv.iterdir()))
    pinned, _total = run_kvfs("pin", "--list", str(kv)).stdout.splitlines()
    assert pinned.split(maxsplit=2)[-1] == r"/a\n  9 GiB  b\x1b[2J"
    line = fails(PathMissing, "evict", kv / "no\nname\x1b[2J")
    assert line == "kvfs: there is no no\\nname\\x1b[2J on this mount"


def test_status_tells_what_may_go(kv: Path, pool: Mounted) -> None:
    store(kv / "a", 4)
    (kv / "a" / "leased").write_bytes(bytes(BLOCK_BYTES))
    run_kvfs("pin", str(kv / "a" / "000.data"))
    with (kv / "a" / "001.data").open("rb"):
        status = pool.status()
    assert status["leased_bytes"] == BLOCK_BYTES
    assert status["pinned_bytes"] == BLOCK_BYTES
    assert status["open_bytes"] == BLOCK_BYTES
    assert status["open_by"] == {
        "processes": {"files": 1, "bytes": BLOCK_BYTES},
        "file_servers": {"files": 0, "bytes": 0},
    }
    assert status["slab_bytes"] == 0
    closed_bytes = pool.status()["evictable_bytes"]
    assert status["evictable_bytes"] == closed_bytes - BLOCK_BYTES >= BLOCK_BYTES
    assert status["warning"] is None
    (kv / "a" / "leased").unlink()


def test_a_path_that_is_missing_pins_and_unpins_none(kv: Path) -> None:
    store(kv / "a", 1)
    fails(PathMissing, "pin", kv / "a", kv / "nothing")
    assert json.loads(run_kvfs("pin", "--list", "--json", str(kv)).stdout)["pins"] == {}
    run_kvfs("pin", str(kv / "a"))
    fails(PathMissing, "unpin", kv / "a", kv / "nothing")
    assert list(json.loads(run_kvfs("pin", "--list", "--json", str(kv)).stdout)["pins"]) == ["/a"]


def test_nothing_is_pinned_on_a_read_only_mount() -> None:
    skip_without_mounts()
    with blank_place() as place:
        run_kvfs("mkfs", str(place / "pool"))
        with Mounted(place / "pool", place / "kv", "-o", "ro") as mounted:
            for verb in ("pin", "unpin", "evict"):
                assert fails(UsageError, verb, mounted.path) == "kvfs: the mount is read-only"


def test_too_much_cannot_be_pinned(kv: Path) -> None:
    store(kv / "a", 150)
    line = fails(UsageError, "pin", kv / "a")
    assert "the limit is" in line


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("evict", "{kv}/nothing"), PathMissing),
        (("pin", "{kv}/nothing"), PathMissing),
        (("unpin", "{kv}/nothing"), PathMissing),
        (("evict", "/"), NotMounted),
        (("pin", "/tmp"), NotMounted),
        (("evict",), UsageError),
        (("evict", *(f"{{kv}}/{number:030}" for number in range(3000))), UsageError),
        (("evict", "{kv}", "--bytes", "much"), UsageError),
        (("evict", "{kv}", "--unused-for", "soon"), UsageError),
    ],
)
def test_mistakes_are_one_line(
    kv: Path, arguments: tuple[str, ...], error: type[CommandError]
) -> None:
    assert fails(error, *(one.format(kv=kv) for one in arguments)).startswith("kvfs: ")


@pytest.mark.parametrize(
    ("verb", "args"),
    [
        ("evict", {"paths": "a"}),
        ("evict", {"paths": [1]}),
        ("evict", {"paths": [""], "bytes": "1M"}),
        ("evict", {"paths": [""], "bytes": True}),
        ("evict", {"paths": [""], "unused_for_s": []}),
        ("job", {"job": 10_000}),
        ("cancel", {}),
        ("pin", {"paths": {}}),
        ("unpin", {"paths": [None]}),
    ],
)
def test_the_server_refuses_what_makes_no_sense(
    pool: Mounted, verb: str, args: dict[str, object]
) -> None:
    with pytest.raises(UsageError):
        ask(socket_path(name_of(str(pool.path))), verb, args)
    assert pool.status()["server_pid"] == pool.server_pid


def test_a_job_can_be_cancelled_and_the_next_one_runs(kv: Path, pool: Mounted) -> None:
    store(kv / "a", 40)
    path = socket_path(name_of(str(pool.path)))
    job = ask(path, "evict", {"paths": [""], "bytes": 40 * BLOCK_BYTES})["job"]
    ask(path, "cancel", {"job": job})
    state = ask(path, "job", {"job": job})
    while not state["done"]:
        state = ask(path, "job", {"job": job})
    assert state["cancelled"] or state["blocks"] == 40
    assert evict(kv)["blocks"] == 40 - state["blocks"]


@pytest.mark.parametrize(("text", "age_s"), [("90s", 90), ("1.5m", 90), ("2w", 1_209_600)])
def test_ages(text: str, age_s: float) -> None:
    assert age_of(text) == age_s


@pytest.mark.parametrize("verb", ["evict", "pin", "unpin"])
def test_help_shows_an_example(verb: str) -> None:
    assert f"kvfs {verb} /kv" in run_kvfs(verb, "--help").stdout
