"""``kvfs evict|pin|unpin --match`` in LMCache's flat directory, and pins in thousands."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.client.control_socket import ask
from kvfs.core.errors import EvictedTooLittle, PathMissing, UsageError
from kvfs.core.mount_name import name_of, socket_path
from tests.support.mounts.mounting import Mounted, run_kvfs, skip_without_mounts
from tests.support.mounts.places import blank_place, small_mount

pytestmark = [pytest.mark.needs_fuse, pytest.mark.one_data_path]

BLOCK_BYTES = 64 << 10
MODELS = ("meta-llama-SEP-Llama-3.1-8B", "Qwen-SEP-Qwen3-32B")


@pytest.fixture(scope="module")
def pool() -> Iterator[Mounted]:
    skip_without_mounts()
    with blank_place() as place, small_mount(place) as mounted:
        yield mounted
        mounted.stop()
        assert mounted.errors() == []


@pytest.fixture
def kv(pool: Mounted) -> Iterator[Path]:
    """A mount with a flat directory at its root, as LMCache's fs adapters make it."""
    for model in MODELS:
        for rank in range(2):
            for number in range(20):
                store(pool.path / f"{model}@0x0200{rank:02}02@{number:064x}.data")
    yield pool.path
    run_kvfs("unpin", "--all", str(pool.path))
    for path in pool.path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def store(block: Path) -> None:
    draft = block.with_suffix(".tmp")
    draft.write_bytes(os.urandom(BLOCK_BYTES))
    draft.rename(block)


def answer(verb: str, kv: Path, *flags: str, check: bool = True) -> dict[str, Any]:
    done = json.loads(run_kvfs(verb, str(kv), *flags, "--json", check=check).stdout)
    assert isinstance(done, dict)
    return done


def count(kv: Path, pattern: str) -> int:
    return len(list(kv.glob(pattern)))


def test_one_model_of_a_flat_directory_goes(kv: Path) -> None:
    old, other = MODELS
    assert answer("evict", kv, "--match", f"{old}@*", "--dry-run")["blocks"] == 40
    assert count(kv, f"{old}@*") == 40
    done = answer("evict", kv, "--match", f"{old}@*@*0a.data")
    assert (done["blocks"], done["bytes"]) == (2, 2 * BLOCK_BYTES)
    assert answer("evict", kv, "--match", f"{old}@0x02000002@*")["blocks"] == 19
    assert (count(kv, f"{old}@*"), count(kv, f"{other}@*")) == (19, 40)
    assert answer("evict", kv, "--match", "*@0x02000102@*", "--bytes", "1M")["blocks"] == 16


def test_what_matches_is_as_if_it_was_named(kv: Path) -> None:
    """A directory that matches goes with all that is below; a pattern does not cross a slash."""
    for directory in ("old/a", "new"):
        (kv / directory).mkdir(parents=True)
        store(kv / directory / "x.data")
    assert answer("evict", kv, "--match", "ol*", "--dry-run")["blocks"] == 1
    assert answer("evict", kv, "--match", "*/x.data", "--dry-run")["blocks"] == 1
    assert answer("evict", kv, "--match", "**/x.data", "--dry-run")["blocks"] == 2
    assert answer("evict", kv / "old", "--match", "old/*/x*", "--dry-run")["blocks"] == 1
    assert answer("evict", kv / "old", "--match", "o*", "--dry-run")["blocks"] == 1
    done = run_kvfs("evict", str(kv), "--match", "x.data", check=False)
    assert done.returncode == PathMissing.exit_code
    assert "matches 'x.data': a pattern is relative to the mount" in done.stderr
    run_kvfs("evict", str(kv), "--match", "**/x.data")


def test_what_stays_and_why_is_told(kv: Path) -> None:
    old, _ = MODELS
    leased = kv / f"{old}@leased.data"
    leased.write_bytes(bytes(BLOCK_BYTES))
    draft = kv / f"{old}@draft.tmp"
    answer("pin", kv, "--match", f"{old}@*0[0-4].data")
    with draft.open("wb") as writer:
        writer.write(bytes(BLOCK_BYTES))
        writer.flush()
        said = run_kvfs("evict", str(kv), "--match", f"{old}@*", "--dry-run").stdout
    assert re.fullmatch(
        r"30 blocks, 1.88 MiB would be evicted; 12 stay: "
        r"draft 1 \([^0].*iB\), leased 1 \(64 KiB\), pinned 10 \(640 KiB\)\n",
        said,
    ), said
    young = answer("evict", kv, "--match", f"{old}@0x*", "--unused-for", "1h")
    assert (young["blocks"], young["kept"]) == (0, {"used since": 40})
    done = run_kvfs("evict", str(kv), "--match", f"{old}@leased*", check=False)
    assert done.returncode == EvictedTooLittle.exit_code


def test_pins_by_a_pattern_come_and_go(kv: Path) -> None:
    old, other = MODELS
    done = answer("pin", kv, "--match", f"{old}@*")
    assert (done["files"], done["bytes"]) == (40, 40 * BLOCK_BYTES)
    assert done["pinned_bytes"] == 40 * BLOCK_BYTES
    assert os.getxattr(kv / f"{old}@0x02000002@{0:064x}.data", "user.kvfs.pin") == b"1"
    again = run_kvfs("pin", str(kv), "--match", f"{old}@*").stdout
    why = "pinned already 40 (2.50 MiB)"
    assert again == f"0 files pinned, 0 B; 40 as before: {why}; 2.50 MiB pinned in all\n"
    assert answer("evict", kv, "--dry-run")["kept"] == {"pinned": 40}
    said = run_kvfs("unpin", str(kv), "--match", "*@0x02000002@*").stdout
    why = "not pinned 20 (1.25 MiB)"
    assert said == f"20 files unpinned, 1.25 MiB; 20 as before: {why}; 1.25 MiB pinned in all\n"
    assert answer("evict", kv, "--match", f"{other}@*")["blocks"] == 40
    assert answer("evict", kv)["kept"] == {"pinned": 20}
    done = run_kvfs("pin", str(kv), "--match", "none*", check=False)
    assert done.returncode == PathMissing.exit_code


def test_the_limit_of_pins_is_kept_and_told(kv: Path, pool: Mounted) -> None:
    limit_bytes = pool.status()["capacity_bytes"] // 2
    for number in range(3):
        with (kv / "large.tmp").open("wb") as draft:
            os.posix_fallocate(draft.fileno(), 0, limit_bytes // 5 * 2)
            draft.truncate(limit_bytes // 5 * 2)
        (kv / "large.tmp").rename(kv / f"large{number}")
    done = run_kvfs("pin", str(kv), "--match", "large*", check=False)
    assert done.returncode == UsageError.exit_code
    assert done.stdout.startswith("2 files pinned")
    assert "as before: beyond pin_share 1 (" in done.stdout
    assert "raise pin_share" in done.stderr


def test_thousands_of_paths_and_of_pins(kv: Path) -> None:
    """One command; more paths than a request holds, and more pins than a reply."""
    names = [f"{'x' * 60}{number:04}" for number in range(1200)]
    (kv / "many").mkdir()
    for name in names:
        (kv / "many" / name).touch()
    run_kvfs("pin", *(str(kv / "many" / name) for name in names))
    listed = json.loads(run_kvfs("pin", "--list", str(kv), "--json").stdout)["pins"]
    assert set(listed) == {f"/many/{name}" for name in names}
    missing = [*names, "missing"]
    done = run_kvfs("unpin", *(str(kv / "many" / name) for name in missing), check=False)
    assert done.returncode == PathMissing.exit_code
    assert len(json.loads(run_kvfs("pin", "--list", str(kv), "--json").stdout)["pins"]) == 1200
    assert answer("unpin", kv, "--all")["files"] == 1200
    assert answer("pin", kv, "--match", "many/x*")["files"] == 1200
    assert answer("unpin", kv, "--match", "many/x*")["files"] == 1200


@pytest.mark.parametrize("verb", ["evict", "pin", "unpin"])
@pytest.mark.parametrize("match", ["", "../x", 7, ["*"]])
def test_a_pattern_that_is_none_is_refused(pool: Mounted, verb: str, match: object) -> None:
    with pytest.raises(UsageError, match="match"):
        ask(socket_path(name_of(str(pool.path))), verb, {"paths": [""], "match": match})
