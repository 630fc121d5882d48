"""How connectors store a block, as the plain system calls they make; each runs as a process.

``python -m tests.support.clients.connector_patterns NAME DIRECTORY`` replays one and stops at each
step (stepping.py). What the calls are was seen with strace or read in the connectors' source.
"""

import concurrent.futures
import contextlib
import fcntl
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Final

from tests.support.clients.stamped import stamped
from tests.support.clients.stepping import say

SIZE: Final = 1 << 20
HEADER: Final = 4096
KEY_BYTES: Final = 61
_WRITE: Final = os.O_WRONLY | os.O_CREAT


@contextlib.contextmanager
def aligned(data: bytes) -> Iterator[mmap.mmap]:
    """Yield *data* in memory that O_DIRECT takes."""
    with mmap.mmap(-1, len(data)) as memory:
        memory[:] = data
        yield memory


def put(path: str, data: bytes, flags: int, *, at: str = "") -> None:
    """Open with *flags*, write *data* at once, close; stop before the close at step *at*."""
    fd = os.open(path, flags, 0o644)
    with aligned(data) as memory:
        assert os.write(fd, memory) == len(data)
    if at:
        say(at)
    os.close(fd)


def lmcache_local_disk() -> None:
    """O_TRUNC at the final name, written again after a restart of the cache."""
    for seed, step in enumerate(("written", "written again")):
        fd = os.open("K.pt", _WRITE | os.O_TRUNC, 0o666)
        os.fstat(fd)
        os.lseek(fd, 0, os.SEEK_CUR)
        assert os.write(fd, stamped("K.pt", SIZE, seed)) == SIZE
        say(step)
        os.close(fd)
        say("closed" if seed == 0 else "closed again")


def lmcache_local_disk_direct() -> None:
    """O_DIRECT at the final name, never O_TRUNC: the second time it is a rewrite in place."""
    for seed, step in enumerate(("written", "written again")):
        put("K.pt", stamped("K.pt", SIZE, seed), _WRITE | os.O_DIRECT, at=step)
        say("closed" if seed == 0 else "closed again")


def lmcache_fs() -> None:
    """Header and block by two writes into K.tmp, then rename."""
    data = stamped("K.data", SIZE)
    fd = os.open("K.tmp", _WRITE | os.O_TRUNC, 0o666)
    os.write(fd, data[:28])
    say("half")
    os.write(fd, data[28:])
    os.close(fd)
    say("closed")
    os.rename("K.tmp", "K.data")
    say("renamed")


def lmcache_fs_direct() -> None:
    """The same without a header: O_DIRECT and no O_TRUNC."""
    put("K.tmp", stamped("K.data", SIZE), _WRITE | os.O_DIRECT, at="half")
    say("closed")
    os.rename("K.tmp", "K.data")
    say("renamed")


def lmcache_l2_fs() -> None:
    """Look, K.tmp with O_TRUNC in another directory, a loop of writes, rename."""
    os.makedirs(".tmp", exist_ok=True)
    assert not os.path.exists("K.data")
    data = memoryview(stamped("K.data", SIZE))
    fd = os.open(".tmp/K.data", _WRITE | os.O_TRUNC, 0o644)
    while data:
        data = data[os.write(fd, data[: SIZE // 4]) :]
        if len(data) == SIZE // 2:
            say("half")
    os.close(fd)
    os.rename(".tmp/K.data", "K.data")
    say("renamed")


def lmcache_gds() -> None:
    """A header, closed; opened again, truncated up and mapped; rename; then the sidecar."""
    os.makedirs("12/34", exist_ok=True)
    data = stamped("K.data", HEADER + SIZE)
    put("12/34/K.tmp1234abcd", data[:HEADER], _WRITE | os.O_TRUNC)
    fd = os.open("12/34/K.tmp1234abcd", os.O_RDWR)
    os.ftruncate(fd, HEADER + SIZE)
    with mmap.mmap(fd, HEADER + SIZE) as memory:
        memory[HEADER:] = data[HEADER:]
    say("half")
    os.close(fd)
    os.rename("12/34/K.tmp1234abcd", "12/34/K.data")
    put("12/34/K.metadata.tmp", data[:HEADER], _WRITE | os.O_TRUNC)
    os.rename("12/34/K.metadata.tmp", "12/34/K.metadata")
    say("renamed")


def nixl_static_pool() -> None:
    """Files that stay open for the life of the process and are written at offsets."""
    names = [f"obj_{number}_12ab.bin" for number in range(2)]
    fds = [os.open(name, os.O_CREAT | os.O_RDWR, 0o755) for name in names]
    for name, fd in zip(names, fds, strict=True):
        data = stamped(name, SIZE)
        for at in (SIZE // 2, 0):
            assert os.pwrite(fd, data[at : at + SIZE // 2], at) == SIZE // 2
    say("half")
    assert os.pread(fds[0], SIZE, 0) == stamped(names[0], SIZE)


def nixl_dynamic() -> None:
    """In place at the final name, without truncating."""
    fd = os.open("K", os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o644)
    with aligned(stamped("K", SIZE)) as memory:
        assert os.pwritev(fd, [memory], 0) == SIZE
    say("written")
    os.close(fd)
    say("closed")


def vllm_fs_tier() -> None:
    """The O_DIRECT probe; then access, an O_EXCL temporary file, one write, close, rename."""
    put(".o_direct_probe_7.tmp", bytes(4096), _WRITE | os.O_TRUNC | os.O_DIRECT)
    os.unlink(".o_direct_probe_7.tmp")
    assert not os.access("abc/K.bin", os.F_OK)
    os.makedirs("abc", exist_ok=True)
    flags = _WRITE | os.O_EXCL | os.O_TRUNC | os.O_DIRECT
    put("abc/K.bin_42.tmp", stamped("K.bin", SIZE), flags, at="half")
    say("closed")
    os.rename("abc/K.bin_42.tmp", "abc/K.bin")
    say("renamed")


def vllm_simple_disk() -> None:
    """A slab: O_EXCL|O_NOFOLLOW, sized at once, pwritev of one part a tensor, unlinked at stop."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_DIRECT
    fd = os.open("disk.rank_0", flags, 0o600)
    os.ftruncate(fd, 4 * SIZE)
    data = stamped("K", SIZE)
    with aligned(data) as memory:
        parts = [memoryview(memory)[: SIZE // 2], memoryview(memory)[SIZE // 2 :]]
        assert os.pwritev(fd, parts, 2 * SIZE) == SIZE
        del parts
    say("half")
    with mmap.mmap(-1, SIZE) as memory:
        assert os.preadv(fd, [memory], 2 * SIZE) == SIZE
        assert memory[:] == data
    os.unlink("disk.rank_0")
    say("unlinked")


def llm_d() -> None:
    """Renamed before the stream is closed; read from the tail; marked as used."""
    fd = os.open("K.bin_77.tmp", _WRITE | os.O_TRUNC, 0o666)
    data = stamped("K.bin", SIZE)
    os.write(fd, data[: SIZE // 2])
    say("half")
    os.write(fd, data[SIZE // 2 :])
    os.rename("K.bin_77.tmp", "K.bin")
    say("renamed")
    os.close(fd)
    with open("K.bin", "rb") as file:
        file.seek(-HEADER, os.SEEK_END)
        assert file.read(HEADER) == data[-HEADER:]
    os.utime("K.bin")
    say("closed")


def sglang_file() -> None:
    """numpy's tofile: a duplicate is closed, and seeks follow, before the descriptor is."""
    fd = os.open(".0123abcd.tmp", _WRITE | os.O_TRUNC, 0o666)
    duplicate = os.dup(fd)
    data = stamped("K.bin", SIZE)
    os.lseek(duplicate, 0, os.SEEK_CUR)
    os.write(duplicate, data[: SIZE // 2])
    os.close(duplicate)
    say("half")
    os.lseek(fd, 0, os.SEEK_END)
    os.write(fd, data[SIZE // 2 :])
    os.lseek(fd, 0, os.SEEK_CUR)
    os.close(fd)
    say("closed")
    os.rename(".0123abcd.tmp", "K.bin")
    say("renamed")


def sglang_nixl() -> None:
    """Two files a block in bucket directories, in place, O_DIRECT, no truncation."""
    os.makedirs("ab", exist_ok=True)
    for name in ("K_k", "K_v"):
        flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT
        put(f"ab/{name}", stamped(name, SIZE), flags, at="half" if name == "K_v" else "")
    say("closed")


def kvbm() -> None:
    """mkostemp, all of it allocated, unlinked early, O_DIRECT switched on, descriptor kept."""
    fd, name = tempfile.mkstemp(prefix="dynamo-kvbm-disk-cache-", dir=".")
    os.posix_fallocate(fd, 0, 4 * SIZE)
    os.rename(name, "slab")  # so that the test knows the name
    os.unlink("slab")
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    data = stamped("K", SIZE)
    with aligned(data) as memory:
        assert os.pwritev(fd, [memory], 3 * SIZE) == SIZE
    say("unlinked")
    with mmap.mmap(-1, SIZE) as memory:
        assert os.preadv(fd, [memory], 3 * SIZE) == SIZE
        assert memory[:] == data
    assert os.fstat(fd).st_nlink == 0


def mooncake_bucket() -> None:
    """Eight keys and blocks by one pwritev in place; read back one at an odd offset."""
    parts = [bytes(KEY_BYTES) if number % 2 == 0 else stamped("K", SIZE) for number in range(16)]
    fd = os.open("1.bucket", _WRITE | os.O_TRUNC, 0o644)
    assert os.pwritev(fd, parts, 0) == 8 * (KEY_BYTES + SIZE)
    say("written")
    os.close(fd)
    put("1.meta", bytes(616), _WRITE | os.O_TRUNC)
    fd = os.open("1.bucket", os.O_RDONLY)
    got = bytearray(SIZE)
    assert os.preadv(fd, [got], 6 * (KEY_BYTES + SIZE) + KEY_BYTES) == SIZE
    assert got == parts[1]
    os.close(fd)
    say("closed")


def mooncake_file_per_key() -> None:
    """In place, key and length before the bytes."""
    os.makedirs("file_per_key_dir/a/b", exist_ok=True)
    os.statvfs(".")
    data = stamped("K", SIZE + 68)
    put("file_per_key_dir/a/b/K", data, _WRITE | os.O_TRUNC, at="written")
    say("closed")


def mooncake_offset_allocator() -> None:
    """One file, emptied and allocated ahead, written at slots."""
    fd = os.open("kv_cache.data", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    os.posix_fallocate(fd, 0, 4 * SIZE)
    assert os.pwritev(fd, [stamped("K", SIZE)], SIZE) == SIZE
    say("half")
    os.close(fd)
    say("closed")


def flexkv() -> None:
    """Sized and synced, closed; opened again for direct reads and writes at slots."""
    with open("flexkv_ssd_cache_0_0.bin", "wb+") as file:
        file.truncate(4 * SIZE)
        os.fsync(file.fileno())
    say("made")
    fd = os.open("flexkv_ssd_cache_0_0.bin", os.O_RDWR | os.O_DIRECT)
    with aligned(stamped("K", SIZE)) as memory:
        assert os.pwritev(fd, [memory], 2 * SIZE) == SIZE
    say("half")
    os.close(fd)
    say("closed")


def ucm() -> None:
    """Shards in any order, each through an open of its own, by many threads; rename; utime."""
    data = stamped("K", SIZE)
    shard_bytes = SIZE // 16

    def shard(number: int) -> None:
        fd = os.open("K.tmp", _WRITE, 0o644)
        at = number * shard_bytes
        assert os.pwrite(fd, data[at : at + shard_bytes], at) == shard_bytes
        os.close(fd)

    shard(15)
    say("one shard")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert len(list(pool.map(shard, range(15)))) == 15
    say("all shards")
    os.rename("K.tmp", "K")
    os.utime("K")
    say("renamed")


def ucm_nfs() -> None:
    """The older store: an O_EXCL file of full size in a directory of temporary files."""
    os.makedirs("temp", exist_ok=True)
    fd = os.open("temp/K.dat", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    os.ftruncate(fd, SIZE)
    os.close(fd)
    say("made")
    data = stamped("K.dat", SIZE)
    for at in (SIZE // 2, 0):
        fd = os.open("temp/K.dat", os.O_WRONLY)
        os.pwrite(fd, data[at : at + SIZE // 2], at)
        os.close(fd)
    os.rename("temp/K.dat", "K.dat")
    say("renamed")


PATTERNS: Final[dict[str, Callable[[], None]]] = {
    pattern.__name__: pattern
    for pattern in (
        lmcache_local_disk,
        lmcache_local_disk_direct,
        lmcache_fs,
        lmcache_fs_direct,
        lmcache_l2_fs,
        lmcache_gds,
        nixl_static_pool,
        nixl_dynamic,
        vllm_fs_tier,
        vllm_simple_disk,
        llm_d,
        sglang_file,
        sglang_nixl,
        kvbm,
        mooncake_bucket,
        mooncake_file_per_key,
        mooncake_offset_allocator,
        flexkv,
        ucm,
        ucm_nfs,
    )
}

if __name__ == "__main__":
    os.chdir(sys.argv[2])
    PATTERNS[sys.argv[1]]()
    say("end")
