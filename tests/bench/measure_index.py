"""Measure the index: ``python -m tests.bench.measure_index DIRECTORY [INODES]``.

Builds an index under DIRECTORY by create-shaped transactions and prints, per call, the mean in
microseconds; p99 for the create. Not collected by pytest.
"""

import random
import sys
import tempfile
import time
from collections.abc import Callable

from kvfs.core.types import FIRST_INODE, ROOT_INODE, InodeNo, InodeRecord, Sequence
from kvfs.storage.index import Index

_CALLS = 100_000


def _name(number: int) -> bytes:
    """A name as LMCache makes them: a model, a hash, a suffix; in no order."""
    spread = number * 0x9E3779B97F4A7C15 % (1 << 64)
    return b"meta-llama@8B@1@0@%016x@bf16.data" % spread


def _record(parent: InodeNo, number: int, entries: int = 0) -> InodeRecord:
    return InodeRecord(
        mode=0o100644, uid=1000, gid=1000, state=2, size_bytes=4 << 20, allocated_bytes=4 << 20,
        atime_ns=1, mtime_ns=2, ctime_ns=3, btime_ns=4, parent=parent, entries=entries, subdirs=0,
        sequence=Sequence(number), name=_name(number), target=b"",
    )  # fmt: skip


def _create(index: Index, number: int) -> None:
    ino = InodeNo(FIRST_INODE + number)
    record = _record(ROOT_INODE, number)
    with index.write() as txn:
        txn.put_inode(ino, record)
        txn.put_name(ROOT_INODE, record.name, ino)
        txn.put_inode(ROOT_INODE, _record(ROOT_INODE, 0, number))
        txn.put_counters(txn.counters()._replace(blocks=number))


def _remove(index: Index, number: int) -> None:
    ino = InodeNo(FIRST_INODE + number)
    with index.write() as txn:
        txn.delete_inode(ino)
        txn.delete_name(ROOT_INODE, _name(number), ino)
        txn.put_inode(ROOT_INODE, _record(ROOT_INODE, 0, number))
        txn.put_counters(txn.counters()._replace(blocks=number))


def _mean(what: str, calls: int, call: Callable[[int], object]) -> None:
    taken: list[int] = []
    now = time.perf_counter_ns
    for number in range(calls):
        start = now()
        call(number)
        taken.append(now() - start)
    taken.sort()
    mean_us, p99_us = sum(taken) / calls / 1000, taken[calls * 99 // 100] / 1000
    print(f"  {what:<34} {mean_us:8.2f} us   p99 {p99_us:8.2f} us")


def _resident(field: str) -> str:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(line.split(":")[1].strip() for line in status if line.startswith(field))


def main() -> None:
    """Run the measurement named on the command line."""
    directory, inodes = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10_000
    order = random.Random(0)
    with tempfile.TemporaryDirectory(dir=directory) as path:
        Index.create(f"{path}/index")
        with Index(f"{path}/index") as index:
            start = time.perf_counter()
            for number in range(inodes):
                _create(index, number)
                if index.preallocation_due():
                    index.preallocate()
            print(
                f"{inodes} inodes: {inodes / (time.perf_counter() - start):,.0f} creates a second"
            )
            calls = min(_CALLS, inodes // 2)
            picks = [order.randrange(inodes) for _ in range(calls)]
            names = [_name(number) for number in picks]
            inos = [InodeNo(FIRST_INODE + number) for number in picks]
            _mean("(the clock itself)", calls, lambda number: None)
            _mean("lookup, hit", calls, lambda number: index.lookup(ROOT_INODE, names[number]))
            _mean("lookup, miss", calls, lambda number: index.lookup(ROOT_INODE, b"no"))
            _mean("inode", calls, lambda number: index.inode(inos[number]))
            _mean("children, 100 rows", calls // 100,
                  lambda number: index.children(ROOT_INODE, inos[number], 100))  # fmt: skip
            _mean("preallocation_due", calls, lambda number: index.preallocation_due())
            _mean("create", calls, lambda number: _create(index, inodes + number))
            _mean("remove", calls, lambda number: _remove(index, number))
            used_bytes, map_rss = index.used_bytes(), _resident("RssFile")
            print(f"  index {used_bytes / (inodes + calls):.0f} bytes an inode; "
                  f"RssAnon {_resident('RssAnon')}, RssFile {map_rss}")  # fmt: skip


if __name__ == "__main__":
    main()
