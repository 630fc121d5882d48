"""Blocks that kvfs evicts, as clients see it: clean misses, and readers who notice nothing."""

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients.stepping import until
from tests.support.mounts.mounting import Mounted, skip_without_mounts, workplace

MIB = 1 << 20
CAPACITY_BYTES = 64 * MIB
BLOCK_BYTES = 4 * MIB


@pytest.fixture(params=["daemon", "passthrough"])
def small(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A mount of a pool of 16 blocks, whose kernel is told nothing."""
    skip_without_mounts()
    with workplace("disk") as place, workplace() as memory:
        (memory / "pool").mkdir()
        flags = (
            f"--capacity={CAPACITY_BYTES}",
            f"--data-path={request.param}",
            *("--set", "notifications=false"),
        )
        with Mounted(memory / "pool", place / "kv", *flags) as mounted:
            yield mounted
            mounted.stop()
            assert mounted.errors() == []


def content(name: str) -> bytes:
    return (name.encode() + b"\n") * (BLOCK_BYTES // (len(name) + 1))


def store(root: Path, name: str) -> None:
    """Store one block, as connectors do."""
    with (root / f"{name}.tmp").open("wb", buffering=0) as file:
        data = content(name)
        assert file.write(data) == len(data)
    os.rename(root / f"{name}.tmp", root / name)


def fill_anew(root: Path, generation: str) -> None:
    """Store three times what the pool holds."""
    for number in range(3 * CAPACITY_BYTES // BLOCK_BYTES):
        store(root, f"{generation}{number}")


def test_an_evicted_name_is_a_clean_miss_though_the_kernel_was_not_told(small: Mounted) -> None:
    """By stat, open, listing and in place: ENOENT, and the name can be stored again."""
    root = small.path
    names = [f"a{number}" for number in range(12)]
    for name in names:
        store(root, name)
        assert (root / name).stat().st_size == len(content(name))  # known to the kernel
    fill_anew(root, "b")
    status = small.status()
    assert status["eviction"]["blocks"] >= 24
    assert status["invalidations"]["sent"] == 0
    gone = set(names) - set(os.listdir(root))
    assert gone
    for name in gone:
        with pytest.raises(FileNotFoundError):
            (root / name).open("rb")
    for name in sorted(gone)[:3]:
        store(root, name)
        assert (root / name).read_bytes() == content(name)
    assert set(small.status()["errors"]) <= {"ESTALE"}


def test_open_files_and_mappings_read_on_when_the_pool_was_filled_anew(small: Mounted) -> None:
    """Also when their names had to go, since all that was closed was gone."""
    root = small.path
    names = [f"held{number}" for number in range(12)]
    files, mappings = [], []
    for name in names[:6]:
        store(root, name)
        files.append((root / name).open("rb", buffering=0))
    for name in names[6:]:
        store(root, name)
        with (root / name).open("rb") as file:
            mappings.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    try:
        fill_anew(root, "b")
        assert set(names) <= set(os.listdir(root)), "others could go"
        with contextlib.suppress(OSError), (root / "large.tmp").open("wb", buffering=0) as draft:
            for _ in range(40):  # more than what is closed holds
                draft.write(bytes(MIB))
        for name, opened in zip(names, files, strict=False):
            assert os.pread(opened.fileno(), BLOCK_BYTES, 0) == content(name)
        for name, mapped in zip(names[6:], mappings, strict=True):
            assert mapped[:] == content(name)
        # Refused, it is gone with its close. Written between two looks at the writers it is there.
        (root / "large.tmp").unlink(missing_ok=True)
        until(lambda: not small.status()["overcommitted_bytes"], "the large one's bytes are freed")
    finally:
        for opened in files:
            opened.close()
        for mapped in mappings:
            mapped.close()
    fill_anew(root, "c")
    assert (root / "c47").read_bytes() == content("c47")
