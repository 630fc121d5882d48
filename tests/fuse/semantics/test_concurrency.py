"""Many threads and processes at once."""

import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from errno import EEXIST, ENOENT, ENOTEMPTY
from pathlib import Path

from tests.support.clients.callers import Caller, callers
from tests.support.kernel.calls import opened, read_file, tolerated, write_file

WORKERS = 6


def together(work: Callable[[int], None], workers: int = WORKERS) -> None:
    """Run *work* in threads that start at once; the first failure is raised."""
    gate = threading.Barrier(workers)

    def run(number: int) -> None:
        gate.wait()
        work(number)

    with ThreadPoolExecutor(workers) as pool:
        for result in [pool.submit(run, number) for number in range(workers)]:
            result.result()


def content_of(worker: int, number: int) -> bytes:
    """Return what a worker writes into its n-th file."""
    return f"{worker}:{number}:".encode() * (1 + (worker * 7919 + number * 104_729) % 3000)


def test_store_cycles_in_parallel(kv: Path) -> None:
    """[threads] Temporary name, write, close, rename, look up, read; six threads at once."""

    def work(worker: int) -> None:
        for number in range(60):
            content = content_of(worker, number)
            write_file(kv / f"{worker}-{number}.tmp", content)
            os.rename(kv / f"{worker}-{number}.tmp", kv / f"{worker}-{number}")
            assert not os.path.lexists(kv / f"{worker}-{number}.tmp")
            assert os.stat(kv / f"{worker}-{number}").st_size == len(content)
            assert read_file(kv / f"{worker}-{number}") == content

    together(work)
    assert len(os.listdir(kv)) == WORKERS * 60
    for worker in range(WORKERS):
        assert read_file(kv / f"{worker}-59") == content_of(worker, 59)


def test_one_name_for_all(kv: Path) -> None:
    """[threads] All replace, read and remove one name; a reader gets a whole version or ENOENT."""
    versions = {content_of(worker, number) for worker in range(WORKERS) for number in range(40)}

    def work(worker: int) -> None:
        chance = random.Random(worker)
        for number in range(40):
            write_file(kv / f"tmp{worker}", content_of(worker, number))
            os.rename(kv / f"tmp{worker}", kv / "name")
            with tolerated(ENOENT):
                assert read_file(kv / "name") in versions
                if chance.random() < 0.3:
                    os.unlink(kv / "name")

    together(work)
    assert [name for name in os.listdir(kv) if name != "name"] == []


def test_directories_come_and_go_in_parallel(kv: Path) -> None:
    """[threads] mkdir -p and rmdir race on the same paths; every error is one of the expected."""

    def work(worker: int) -> None:
        for _ in range(50):
            path = kv / "a" / "b" / "c"
            with tolerated(ENOENT, EEXIST):
                path.mkdir(parents=True, exist_ok=True)
                write_file(path / f"file{worker}", b"content")
                os.unlink(path / f"file{worker}")
            for below in (path, path.parent, path.parent.parent):
                with tolerated(ENOENT, ENOTEMPTY):
                    os.rmdir(below)

    together(work)
    info = os.stat(kv)
    assert info.st_nlink == 2 + len(os.listdir(kv))


def test_writers_of_disjoint_ranges(kv: Path) -> None:
    """[threads] Several processes fill one file, out of order, each by its own descriptor."""
    part, parts = 70_001, 8
    write_file(kv / "file", b"")

    def fill(numbered: tuple[int, Caller]) -> None:
        number, caller = numbered
        fd = caller.os("open", str(kv / "file"), os.O_WRONLY)
        for step in reversed(range(parts)):
            at = (step * WORKERS + number) * part
            assert caller.os("pwrite", fd, bytes([number * parts + step]) * part, at) == part
        caller.os("close", fd)

    with callers(WORKERS) as processes, ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(fill, enumerate(processes)))
    content = read_file(kv / "file")
    assert len(content) == part * parts * WORKERS
    for step in range(parts):
        for number in range(WORKERS):
            at = (step * WORKERS + number) * part
            assert content[at : at + part] == bytes([number * parts + step]) * part


def test_truncates_and_writes_in_parallel(kv: Path) -> None:
    """[threads] Whatever the order: zeros and written bytes, and the size is one of both."""
    with opened(kv / "file", os.O_CREAT | os.O_RDWR) as fd:

        def work(worker: int) -> None:
            for _ in range(50):
                if worker % 2:
                    os.ftruncate(fd, 10_000)
                else:
                    assert os.pwrite(fd, b"\xaa" * 5_000, 8_000) == 5_000

        together(work)
        content = os.pread(fd, 20_000, 0)
    assert len(content) in (10_000, 13_000)
    assert content[:8_000] == bytes(8_000)
    assert set(content[8_000:]) <= {0, 0xAA}


def test_renames_across_directories_in_parallel(kv: Path) -> None:
    """[threads] Directories move between parents; no name is lost or doubled."""
    for number in range(4):
        (kv / f"p{number}").mkdir()
    for number in range(8):
        (kv / "p0" / f"d{number}").mkdir()
        write_file(kv / "p0" / f"d{number}" / "file", b"%d" % number)

    def work(worker: int) -> None:
        chance = random.Random(worker)
        for _ in range(80):
            name = f"d{chance.randrange(8)}"
            old, new = chance.sample(range(4), 2)
            with tolerated(ENOENT):
                os.rename(kv / f"p{old}" / name, kv / f"p{new}" / name)

    together(work)
    found = sorted(path.name for path in kv.glob("p*/d*"))
    assert found == [f"d{number}" for number in range(8)]
    for path in kv.glob("p*/d*"):
        assert read_file(path / "file") == path.name[1:].encode()
    links = sum(os.stat(kv / f"p{number}").st_nlink for number in range(4))
    assert links == 4 * 2 + 8


def test_a_killed_writer_harms_nobody(kv: Path) -> None:
    """[threads] A process that dies in the middle of its calls leaves a mount that works."""
    code = (
        "import os, sys, threading\n"
        "os.chdir(sys.argv[1])\n"
        "def work(k):\n"
        "    n = 0\n"
        "    while True:\n"
        "        n += 1\n"
        "        with open(f't{k}', 'wb') as f: f.write(b'x' * 100000)\n"
        "        os.rename(f't{k}', f'f{k}')\n"
        "        if n == 5 and k == 0: print('go', flush=True)\n"
        "for k in range(4): threading.Thread(target=work, args=(k,)).start()\n"
    )
    for _ in range(5):
        with subprocess.Popen(
            [sys.executable, "-c", code, str(kv)], stdout=subprocess.PIPE
        ) as writing:
            assert writing.stdout is not None
            assert writing.stdout.readline() == b"go\n"
            writing.kill()
        write_file(kv / "alive", b"yes")
        assert read_file(kv / "alive") == b"yes"
        assert read_file(kv / "f0") == b"x" * 100_000
