"""No byte of a block passes the server on passthrough: its system calls are the witness."""

import mmap
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from tests.fuse.conftest import require_passthrough
from tests.support.devices.loop import loop_device
from tests.support.kernel.caches import forget_blocks
from tests.support.kernel.calls import opened, write_file
from tests.support.mounts.mounting import Mounted, run_kvfs, workplace

pytestmark = [pytest.mark.needs_fuse, pytest.mark.needs_loop]

MIB: Final = 1 << 20
BLOCK_BYTES: Final = 32 * MIB
BLOCKS: Final = 8
DRIVE_BYTES: Final = 1 << 30
#: Every call by which bytes enter or leave a process; readv of /dev/fuse is a request of < 100 B.
MOVING: Final = (
    *("read", "pread64", "readv", "preadv", "preadv2", "recvfrom", "recvmsg"),
    *("write", "pwrite64", "writev", "pwritev", "pwritev2", "sendto", "sendmsg"),
    *("splice", "tee", "vmsplice", "sendfile", "copy_file_range", "process_vm_readv"),
)
#: A load of one block is five messages of less than 200 bytes, each read and answered.
BYTES_PER_LOAD_MAX: Final = 4096
#: A store is ten messages, and a transaction or two; LMDB writes whole pages.
BYTES_PER_STORE_MAX: Final = 128 << 10
#: The line that strace writes for a call that is whole, e.g. "12 readv(5, ...) = 96".
_DONE: Final = re.compile(r"(?:\d+\s+)?(?:<\.\.\. )?(\w+)(?:\(| resumed>).* = (\d+)")

#: How strace writes a descriptor of the control socket, or of the supervisor.
_TOLD: Final = "<socket:["


class Trace:
    """What one process asked the kernel for, by call."""

    def __init__(self, pid: int, output: Path) -> None:
        self._output = output
        self._stopped = False
        command = ["strace", "-f", "-y", "-qq", "-s", "0", "-o", str(output), "-p", str(pid)]
        self._strace = subprocess.Popen(
            [*command, "-e", f"trace={','.join(MOVING)}"], stderr=subprocess.PIPE
        )

    def attached(self, mount: Mounted) -> None:
        """Return when calls are being recorded: a request's own is among them."""
        while not self._output.exists() or not self._output.stat().st_size:
            assert self._strace.poll() is None, "strace ended"
            os.statvfs(mount.path)

    def stop(self) -> None:
        """Let the process go on without it."""
        if not self._stopped:
            self._stopped = True
            self._strace.send_signal(signal.SIGINT)
            self._strace.communicate()

    def moved(self) -> Counter[str]:
        """Return the bytes that each call moved, but for what it tells and is told of itself.

        A command of a test beside this one asks all servers of the machine for their status.
        """
        bytes_by_call: Counter[str] = Counter()
        pending: dict[str, bool] = {}
        for line in self._output.read_text().splitlines():
            thread, is_told = line.split()[0], _TOLD in line
            if line.endswith("<unfinished ...>"):
                pending[thread] = is_told
            elif found := _DONE.match(line):
                is_told = pending.pop(thread, False) if " resumed>" in line else is_told
                bytes_by_call[found[1]] += 0 if is_told else int(found[2])
        return bytes_by_call


@pytest.fixture(scope="module")
def mount() -> Iterator[Mounted]:
    """A pool on an XFS of its own, bytes through the kernel.

    Without checksums: those are made of bytes in the page cache, for no request.
    """
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    with (
        workplace("disk") as directory,
        loop_device(DRIVE_BYTES) as drive,
        Mounted(drive.path, directory / "kv", "--set", "checksum_share=0") as mount,
    ):
        require_passthrough(mount)
        yield mount


@pytest.fixture
def trace(mount: Mounted) -> Iterator[Trace]:
    """A strace of the server."""
    with workplace("disk") as directory:
        made = Trace(mount.server_pid, directory / "calls")
        try:
            made.attached(mount)
            yield made
        finally:
            made.stop()


@pytest.fixture(scope="module")
def blocks(mount: Mounted) -> list[Path]:
    """Blocks of 32 MiB, published and durable."""
    paths = [mount.path / f"block{number}" for number in range(BLOCKS)]
    for number, path in enumerate(paths):
        write_file(path, bytes([number]) * BLOCK_BYTES)
    run_kvfs("sync", str(mount.path))
    return paths


def load(path: Path, number: int, *, direct: bool = False) -> None:
    """Open, read, close, as connectors do."""
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    with opened(path, flags) as fd, mmap.mmap(-1, BLOCK_BYTES) as memory:
        at = 0
        while at < BLOCK_BYTES:
            part = os.preadv(fd, [memoryview(memory)[at:]], at)
            assert part > 0
            at += part
        assert memory[0] == memory[BLOCK_BYTES - 1] == number


def load_all(mount: Mounted, blocks: list[Path], rounds: int, *, direct: bool = False) -> int:
    """Load every block *rounds* times from the drive, two at a time; return how many loads."""
    for _ in range(rounds):
        forget_blocks(mount)
        with ThreadPoolExecutor(2) as pool:
            work = [
                pool.submit(load, path, number, direct=direct) for number, path in enumerate(blocks)
            ]
            for loading in work:
                loading.result()
    return rounds * len(blocks)


def store_cycle(path: Path, number: int) -> None:
    """Temporary name, one write, close, rename."""
    with opened(path.with_suffix(".tmp"), os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
        assert os.write(fd, bytes([number]) * BLOCK_BYTES) == BLOCK_BYTES
    os.rename(path.with_suffix(".tmp"), path)


def test_the_witness_sees_what_passes_the_server(mount: Mounted, trace: Trace) -> None:
    """An attribute does: so the tests below would see a block."""
    path = mount.path / "witness"
    path.touch()
    os.setxattr(path, "user.large", bytes(4000))
    assert os.getxattr(path, "user.large") == bytes(4000)
    os.statvfs(mount.path)
    trace.stop()
    moved = trace.moved()
    assert (
        moved["read"] + moved["readv"] >= 4000
    )  # by the compiled reader, and by the one in Python
    assert moved.total() >= 3 * 4000


def test_loads_pass_the_server_by(mount: Mounted, blocks: list[Path], trace: Trace) -> None:
    """From the drive, buffered and O_DIRECT: 512 MiB, of which it moves a few kilobytes."""
    loads = load_all(mount, blocks, 1) + load_all(mount, blocks, 1, direct=True)
    trace.stop()
    assert trace.moved().total() <= loads * BYTES_PER_LOAD_MAX


def test_other_ways_to_read_pass_the_server_by(
    mount: Mounted, blocks: list[Path], trace: Trace
) -> None:
    """A mapping and sendfile."""
    forget_blocks(mount)
    with (
        opened(blocks[1], os.O_RDONLY) as fd,
        mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as memory,
        open(os.devnull, "wb") as sink,
    ):
        assert memory.find(b"\0") == -1
        with opened(blocks[2], os.O_RDONLY) as source:
            at = 0
            while at < BLOCK_BYTES:
                at += os.sendfile(sink.fileno(), source, at, BLOCK_BYTES - at)
    trace.stop()
    assert trace.moved().total() <= 2 * BYTES_PER_LOAD_MAX


def test_stores_pass_the_server_by(mount: Mounted, trace: Trace) -> None:
    """What it moves are names: requests, and pages of the index."""
    for number in range(BLOCKS):
        store_cycle(mount.path / f"stored{number}", number)
    os.statvfs(mount.path)
    trace.stop()
    assert trace.moved().total() <= BLOCKS * BYTES_PER_STORE_MAX
    for number in range(BLOCKS):
        os.unlink(mount.path / f"stored{number}")


@pytest.mark.proof
def test_a_load_of_ten_gigabytes_passes_the_server_by(
    mount: Mounted, blocks: list[Path], trace: Trace
) -> None:
    """The sum of what every reading and writing call of the server moved meanwhile."""
    rounds = 10_000_000_000 // (BLOCKS * BLOCK_BYTES) + 1
    loads = load_all(mount, blocks, rounds)
    trace.stop()
    moved = trace.moved()
    print(f"{loads} loads of {BLOCK_BYTES} bytes; the server moved", dict(moved))
    assert loads * BLOCK_BYTES >= 10_000_000_000
    assert moved.total() <= loads * BYTES_PER_LOAD_MAX
