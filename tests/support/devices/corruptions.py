"""One thing of a pool is corrupted, and a store started on it: right bytes, a miss, or a refusal.

``python -m tests.support.devices.corruptions SEED FIRST COUNT`` tries so many, each on a fresh copy
of a small pool, and prints a line of JSON for each: first what it is, then what came of it. It is a
process of its own since LMDB may end it, and a server with it; the caller then goes on behind that
one.
"""

import contextlib
import dataclasses
import json
import logging
import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvfs.core.errors import CommandError, KvfsError
from kvfs.core.types import ROOT_INODE
from mount.fuse.device_number import remembered
from tests.support.devices.corrupted_pool import Known, fill, read_all
from tests.support.mounts.mounting import loop_device, mounted_at, workplace
from tests.support.store.stores import Host, get, put, settle

PAGE_BYTES: Final = 4096
#: XFS takes no less than 300 MiB.
_DRIVE_BYTES: Final = 300 << 20
#: What an operator who follows the refusal does, and the sweep, are tried for one in so many.
_REPAIR_EVERY: Final = 4
_SWEEP_EVERY: Final = 8

#: What is corrupted, and how often.
TARGETS: Final = {
    "index": 40,
    "identity": 20,
    "extent": 15,
    "RUN": 8,
    "INODES": 6,
    "HEAT": 6,
    "log": 12,
    "POOL": 3,
    "DEVICE": 2,
}
WAYS: Final = ("bit", "zeroed page", "truncated", "swapped", "older copy")
#: How the last server ended: what a start then trusts.
ENDS: Final = ("stopped", "killed", "cut off")


class Pool:
    """A small pool in three states, and as it was some changes earlier."""

    def __init__(self, running: Host) -> None:
        self.running = running
        self.place = running.path.parent
        running.settings = dataclasses.replace(
            running.settings,
            index_log_s=3600.0,
            verify="open",
            checksum_share=1.0,
            durable_within_s=0.1,
        )
        running.start()
        self.known = Known()
        fill(running, self.known, 0)
        running.stop()
        (running.path / "DEVICE").write_text("40\n")
        self._save("older")
        running.start()
        fill(running, self.known, 1)
        self._save("killed")
        running.stop()
        self._save("stopped")
        self.restore("killed")
        running.pretend_reboot()
        self._save("cut off")

    def _save(self, name: str) -> None:
        _copy_tree(self.running.path, self.place / name)

    def restore(self, name: str) -> None:
        """Make the pool what it was."""
        for path in self.running.path.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        _copy_tree(self.place / name, self.running.path)

    def older(self, path: Path) -> Path:
        """Return the file that *path* was earlier; it may not exist."""
        return self.place / "older" / path.relative_to(self.running.path)


def _copy_tree(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        if path.is_dir():
            _copy_tree(path, target / path.name)
        else:
            _copy_file(path, target / path.name)


def _copy_file(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    for name in os.listxattr(source):
        os.setxattr(target, name, os.getxattr(source, name))


# ---- the corruptions: each changes a file and returns what it did, or nothing if it cannot ----


def _files(pool: Pool, target: str) -> list[Path]:
    top = pool.running.path
    if target == "index":
        return [top / "index" / "data.mdb"]
    if target in ("extent", "identity"):
        tops = ("extents",) if target == "extent" else ("extents", "identities")
        return sorted(file for name in tops for file in (top / name).glob("*/*"))
    if target == "log":
        return sorted((top / "log").iterdir())
    return [top / target]


def corrupt_file(pool: Pool, path: Path, others: list[Path], way: str, draw: random.Random) -> str:
    """Corrupt the content of *path*; return what was done."""
    data = bytearray(path.read_bytes())
    filled = np.flatnonzero(np.frombuffer(data, np.uint8))
    used_bytes = int(filled[-1]) + 1 if len(filled) else len(data)
    if way == "older copy":
        if not pool.older(path).exists():
            return ""
        _copy_file(pool.older(path), path)
        return "all of it"
    if way == "swapped" and len(others) > 1:
        other = draw.choice([one for one in others if one != path])
        saved = other.read_bytes()
        other.write_bytes(bytes(data))
        path.write_bytes(saved)
        return f"with {other.name}"
    if not used_bytes:
        return ""
    at = draw.randrange(used_bytes)
    page = at // PAGE_BYTES * PAGE_BYTES
    if way == "bit":
        data[at] ^= 1 << draw.randrange(8)
    elif way == "zeroed page":
        size_bytes = min(PAGE_BYTES, len(data) - page)
        data[page : page + size_bytes] = bytes(size_bytes)
    elif way == "truncated":
        del data[at:]
    else:
        other_page = draw.randrange(used_bytes) // PAGE_BYTES * PAGE_BYTES
        one, two = (data[start : start + PAGE_BYTES] for start in (page, other_page))
        if len(one) != len(two) or page == other_page:
            return ""
        data[page : page + PAGE_BYTES], data[other_page : other_page + PAGE_BYTES] = two, one
        path.write_bytes(data)
        return f"pages at {page} and {other_page}"
    path.write_bytes(data)
    return f"at {at}"


def corrupt_identity(
    pool: Pool, path: Path, others: list[Path], way: str, draw: random.Random
) -> str:
    """Corrupt an extended attribute of *path*."""
    present = [name for name in os.listxattr(path) if name.startswith("trusted.kvfs.")]
    if not present:
        return ""
    name = draw.choice(sorted(present))
    value = bytearray(os.getxattr(path, name))
    if way == "swapped":
        holders = [one for one in others if one != path and name in os.listxattr(one)]
        if not holders:
            return ""
        other = draw.choice(holders)
        saved = os.getxattr(other, name)
        os.setxattr(other, name, bytes(value))
        os.setxattr(path, name, saved)
        return f"{name} with {other.name}"
    if way == "older copy":
        older = pool.older(path)
        if not older.exists() or name not in os.listxattr(older):
            os.removexattr(path, name)
            return f"{name} removed"
        os.setxattr(path, name, os.getxattr(older, name))
        return name
    if not value:
        return ""
    at = draw.randrange(len(value))
    if way == "bit":
        value[at] ^= 1 << draw.randrange(8)
    elif way == "truncated":
        del value[at:]
    else:
        value = bytearray(len(value))
    os.setxattr(path, name, bytes(value))
    return f"{name} at {at}"


def corrupt(pool: Pool, draw: random.Random) -> dict[str, str]:
    """Corrupt one thing that is drawn; return what, so that it can be told."""
    while True:
        target = draw.choices(list(TARGETS), list(TARGETS.values()))[0]
        way = draw.choice(WAYS)
        paths = [path for path in _files(pool, target) if path.exists()]
        if not paths:
            continue
        path = draw.choice(paths)
        change = corrupt_identity if target == "identity" else corrupt_file
        if done := change(pool, path, paths, way, draw):
            file = str(path.relative_to(pool.running.path))
            return {"target": target, "way": way, "file": file, "done": done}


# ---- what comes of it ----


def attempt(pool: Pool, *, repairs: bool, sweeps: bool) -> dict[str, Any]:
    """Start on the pool as it is, use it, and stop; return what came of it."""
    running = pool.running
    result: dict[str, Any] = {}
    pool_fd = os.open(running.path, os.O_RDONLY)
    remembered([pool_fd])
    os.close(pool_fd)
    try:
        store = running.start()
    except CommandError as error:
        lines = str(error).splitlines()
        result["came"] = "refused" if len(lines) == 1 else "refused in several lines"
        result["said"] = str(error)
        if repairs:
            result["repair"] = _repair(pool)
        return result
    found = read_all(store, pool.known)
    if sweeps:
        with _noted(result, "settle"):
            settle(store)
        found |= read_all(store, pool.known)
    with _noted(result, "put"):
        put(store, ROOT_INODE, b"another", b"n" * 5000)
        assert get(store, ROOT_INODE, b"another") == b"n" * 5000
    with _noted(result, "evict"):
        store.evict(1 << 20)
    result["came"] = found.worst()
    result["counts"] = found.counts()
    with _noted(result, "stop"):
        running.stop()
    running.end()
    return result


def _repair(pool: Pool) -> str:
    """What an operator does who is told so: fsck --repair, and mount."""
    try:
        pool.running.check(repair=True)
        found = read_all(pool.running.start(), pool.known)
    except CommandError as error:
        return f"refused: {error}"
    pool.running.end()
    return found.worst()


@contextlib.contextmanager
def _noted(result: dict[str, Any], what: str) -> Iterator[None]:
    """Note an error of a call: what kvfs raises on purpose is an answer, the rest is not."""
    try:
        yield
    except KvfsError as error:
        result.setdefault("answers", []).append(f"{what}: {type(error).__name__}")
    except Exception as error:  # an unexpected one fails its own call alone
        result.setdefault("unexpected", []).append(f"{what}: {type(error).__name__}: {error}")


@contextlib.contextmanager
def _host() -> Iterator[Host]:
    """Yield a host whose pool is on an XFS: what memory holds is durable, and gets no checksum."""
    with (
        loop_device(_DRIVE_BYTES, format_xfs=True) as device,
        workplace() as place,
        mounted_at(place / "xfs", device) as top,
    ):
        (top / "pool").mkdir()
        running = Host(top / "pool", index_place="pool")
        try:
            yield running
        finally:
            running.end()


def main(seed: int, first: int, count: int) -> None:
    """Try so many, and print what came of each."""
    logging.disable(logging.CRITICAL)
    with _host() as running:
        pool = Pool(running)
        for number in range(first, first + count):
            draw = random.Random(f"{seed}-{number}")
            end = draw.choice(ENDS)
            pool.restore(end)
            what = {"number": number, "end": end, **corrupt(pool, draw)}
            print(json.dumps(what), flush=True)
            came = attempt(
                pool,
                repairs=number % _REPAIR_EVERY == 0,
                sweeps=number % _SWEEP_EVERY == 0,
            )
            running.end()
            print(json.dumps(came), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
