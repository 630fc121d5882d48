"""MLPerf Storage v3's kv-cache.py by its calls: the program itself is in no package index.

Its NVMe tier (kv_cache/backends.py in github.com/mlcommons/storage): ``np.save`` in place, for
which numpy asks for a big array's room by ``fallocate``, flush, fsync; ``exists``, open,
``posix_fadvise(DONTNEED)``, close and ``np.load``; ``unlink``; at its start it unlinks ``*.npy``.
It counts bytes before it reads and hides read errors, so that its own figures prove nothing: here
every byte is compared, and kvfs's counters must agree.
"""

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.mounts.mounting import Mounted, Reference

pytestmark = [pytest.mark.connectors, pytest.mark.needs_fuse]

KEYS: Final = 6
THREADS: Final = 4
BIG_BYTES: Final = 16 << 20
"""From here on numpy asks for a file's room before it writes; each entry of the program does."""
ELEMENTS: Final = BIG_BYTES // 2 + 7
"""float16: a file of no round size behind numpy's header of 128 bytes."""

HEADER_BYTES: Final = 128

Block = npt.NDArray[np.float16]


def block_of(key: int, version: int) -> Block:
    """The content of a block; no two are alike."""
    bits = np.random.Generator(np.random.SFC64([key, version])).bytes(2 * ELEMENTS)
    return np.frombuffer(bits, dtype=np.float16)


class NvmeTier:
    """What the benchmark's NVMe tier does, call by call."""

    def __init__(self, base: Path) -> None:
        self.base = base
        for left in base.glob("*.npy"):
            left.unlink()

    def path(self, key: int) -> Path:
        return self.base / f"user_{key:04}_seq_0.npy"

    def write(self, key: int, block: Block) -> None:
        with self.path(key).open("wb") as file:
            np.save(file, block, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())

    def read(self, key: int) -> Block | None:
        if not self.path(key).exists():
            return None
        fd = os.open(self.path(key), os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        loaded: Block = np.load(self.path(key), allow_pickle=False)
        return loaded

    def delete(self, key: int) -> None:
        self.path(key).unlink(missing_ok=True)


class TestMlperfKvCache:
    """Several threads, as the benchmark's users are."""

    data_path: ClassVar[str] = "auto"

    def write(self, tier: NvmeTier, keys: range, version: int) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda key: tier.write(key, block_of(key, version)), keys))

    def holds(self, tier: NvmeTier, keys: range, version: int) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            for key, block in zip(keys, pool.map(tier.read, keys), strict=True):
                assert block is not None
                assert np.array_equal(block.view(np.uint16), block_of(key, version).view(np.uint16))

    def test_every_byte_and_every_counter(self, mount: Mounted | Reference, kv_dir: Path) -> None:
        """A write that was not made, or a read that failed unseen, is missing from kvfs's counters.

        The program stores each key once; that one is stored again here is for kvfs's sake.
        """
        before = mount.status() if isinstance(mount, Mounted) else {}
        tier = NvmeTier(kv_dir)
        keys = range(KEYS)
        assert [tier.read(key) for key in keys] == [None] * KEYS
        self.write(tier, keys, version=1)
        self.holds(tier, keys, version=1)
        if isinstance(mount, Mounted):
            counted = Counter(mount.status()["requests"]) - Counter(before["requests"])
            assert (counted["CREATE"], counted["FALLOCATE"]) == (KEYS, KEYS)
            assert counted["OPEN"] == 2 * KEYS
        self.write(tier, keys, version=2)
        self.holds(tier, keys, version=2)
        for key in keys[::2]:
            tier.delete(key)
            assert tier.read(key) is None
        if isinstance(mount, Mounted):
            after = mount.status()
            assert after["requests"]["UNLINK"] - before["requests"].get("UNLINK", 0) == KEYS // 2
            assert after["blocks"] - before["blocks"] == KEYS // 2
            stored_bytes = sum(path.stat().st_size for path in kv_dir.iterdir())
            assert stored_bytes == KEYS // 2 * (2 * ELEMENTS + HEADER_BYTES)
            used_bytes = after["used_bytes"] - before["used_bytes"]
            assert 0 <= used_bytes - stored_bytes < KEYS // 2 * 4096
            assert (after["damaged_rows"], after["torn_blocks"]) == (0, before["torn_blocks"])

    def test_a_new_run_starts_with_nothing(self, mount: Mounted | Reference, kv_dir: Path) -> None:
        assert mount.path.is_dir()
        tier = NvmeTier(kv_dir)
        tier.write(1, block_of(1, 1))
        assert NvmeTier(kv_dir).read(1) is None
        assert list(kv_dir.iterdir()) == []


class TestMlperfKvCacheDaemonPath(TestMlperfKvCache):
    """The same, every byte through the daemon."""

    data_path = "daemon"
