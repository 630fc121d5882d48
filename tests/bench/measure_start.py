"""Measure starts, after a kill and a power loss: ``python -m tests.bench.measure_start IMAGE N``.

Makes a pool of N blocks in the new file IMAGE: rows of the index, and with ``--files`` an
extent with its identity for each. Has the index copied, stores ``--logged`` blocks that go to its
log, and kills the store, whose index stays in memory. Then it stores a hundred that are not
logged, cuts the XFS off and starts again with nothing in memory. Prints JSON: bytes of each kind of
row, seconds until the XFS was mounted and until the first lookup from there on, and with
``--files`` until all was compared and what a rebuild takes instead. Needs root, 13 GiB of disk for
a million blocks with files; for ten million without, 58 GiB that are free, of which it takes 10,
and 6 GiB of memory. Not collected by pytest.
"""

import argparse
import json
import os
import stat
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any, Final

from kvfs.core.inode_rules import identity_of
from kvfs.core.lifecycle import State
from kvfs.core.records import CHILD_PREFIX, INODE_PREFIX, NAME_PREFIX
from kvfs.core.settings import Settings
from kvfs.core.types import NO_INODE, ROOT_INODE, InodeNo, InodeRecord, Sequence
from kvfs.devices import Device, format_source, open_source, wait_released
from kvfs.engine.store import Store
from kvfs.storage.index_place import discard_index
from kvfs.storage.row_log import forget_log
from kvfs.storage.syscalls import Syscalls
from tests.support.devices.power_cuts.power import Cut, shut_down
from tests.support.store.driven import Driven, driven
from tests.support.store.stores import fill_pool, put, settle

_BATCH: Final = 8192
_BLOCK_BYTES: Final = 4096
_YOUNG: Final = 100
_KINDS: Final = (("inodes", INODE_PREFIX), ("names", NAME_PREFIX), ("children", CHILD_PREFIX))
_ROW_BYTES: Final = 700
#: An inode of 1 KiB, a block, and what XFS keeps beside them.
_FILE_BYTES: Final = 8 << 10


def _name(number: int) -> bytes:
    return b"meta-llama@8B@1@0@%016x@bf16.data" % number


def _record(number: int) -> InodeRecord:
    return InodeRecord(
        mode=stat.S_IFREG | 0o644, uid=1000, gid=1000, state=State.PUBLISHED,
        size_bytes=_BLOCK_BYTES, allocated_bytes=_BLOCK_BYTES, atime_ns=1, mtime_ns=2, ctime_ns=3,
        btime_ns=4, parent=ROOT_INODE, entries=0, subdirs=0, sequence=Sequence(number + 1),
        name=_name(number), target=b"",
    )  # fmt: skip


def _fill(store: Store, names: int, *, files: bool) -> None:
    pool = store.pool
    for start in range(0, names, _BATCH):
        if pool.numbers.refill_due:
            pool.numbers.refill()
        if pool.index.preallocation_due():
            pool.index.preallocate()
        with pool.index.write() as txn:
            for number in range(start, min(start + _BATCH, names)):
                ino, record = pool.numbers.give_out(), _record(number)
                if files:
                    record = _with_file(store, ino, record)
                txn.put_inode(ino, record)
                txn.put_name(ROOT_INODE, record.name, ino)
        print(f"\r{start:,} of {names:,}", end="", file=sys.stderr)
    root = store.namespace.directory(ROOT_INODE)
    counters = pool.counters._replace(
        blocks=names, used_bytes=names * _BLOCK_BYTES, sequence=names + 1
    )
    with pool.change(counters, begun=NO_INODE) as change:
        change.txn.put_inode(ROOT_INODE, root._replace(entries=names))


def _with_file(store: Store, ino: InodeNo, record: InodeRecord) -> InodeRecord:
    """Make the extent of *ino* with its identity."""
    pool = store.pool
    fd = pool.extents.create(ino, 0)
    try:
        os.pwrite(fd, b"k" * _BLOCK_BYTES, 0)
        record = record._replace(mtime_ns=os.fstat(fd).st_mtime_ns)
    finally:
        os.close(fd)
    pool.extents.identify(ino, identity_of(ino, record))
    return record


def _copy(store: Store) -> float:
    """Have the index copied, beside requests; return how long that took."""
    begun_s = time.monotonic()
    index_log = store.pool.durable.index_log
    before = index_log.copies
    while index_log.copies == before:
        index_log.run_due(time.monotonic())
        time.sleep(0.001)
    return time.monotonic() - begun_s


def _log(driver: Driven, blocks: int) -> None:
    """Store small *blocks*, and have them logged a thousand at a time."""
    for number in range(blocks):
        put(driver, ROOT_INODE, b"logged %d" % number, b"y")
        if number % 1000 == 999:
            driver.log_index()
    driver.log_index()


def _end(driver: Driven) -> None:
    """End the store, and its memory with it."""
    index_in = driver.describe()["index_in"]
    driver.kill()
    discard_index(index_in, Syscalls())


def _row_bytes(store: Store, prefix: bytes) -> int:
    rows = chain.from_iterable(store.pool.index.walk(prefix, _BATCH))
    return sum(len(key) + len(value) for key, value in rows)


def _cut(device: Device, image: Path) -> None:
    shut_down(device.pool_fd, Cut.NOTHING)
    _close(device, image)


def _close(device: Device, image: Path) -> None:
    device.close()
    wait_released(str(image))
    Path("/proc/sys/vm/drop_caches").write_text("3")


def _start(image: Path, settings: Settings, *, names: int) -> tuple[Device, Driven, dict[str, Any]]:
    times = [time.monotonic()]
    device = open_source(str(image))
    times.append(time.monotonic())
    store = driven(device, settings)
    store.engine.namespace.lookup(ROOT_INODE, _name(names // 2)) if names else None
    times.append(time.monotonic())
    found = {"mount_xfs_s": times[1] - times[0], "serves_s": times[2] - times[1]}
    return device, store, found


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", type=Path)
    parser.add_argument("names", type=int, metavar="N")
    parser.add_argument("--files", action="store_true")
    parser.add_argument("--logged", type=int, default=0, metavar="BLOCKS")
    given = parser.parse_args()
    # Without files their room counts as used all the same; it takes no disk.
    each_bytes = _ROW_BYTES + (_FILE_BYTES if given.files else _BLOCK_BYTES)
    size_bytes = given.names * each_bytes * 5 // 4 + (2 << 30)
    format_source(str(given.image), size_bytes=size_bytes, fill=fill_pool)
    settings = Settings()
    found: dict[str, Any] = {"names": given.names, "files": given.files}
    try:
        device, driver, _ = _start(given.image, settings, names=0)
        _fill(driver.engine, given.names, files=given.files)
        driver.sync()
        driver.engine.pool.index.preallocate()
        found["index_bytes"] = driver.engine.pool.index.used_bytes()
        found["row_bytes_a_name"] = {
            what: round(_row_bytes(driver.engine, prefix) / given.names, 1)
            for what, prefix in _KINDS
        }
        found["copy_s"] = _copy(driver.engine)
        _log(driver, given.logged)
        driver.kill()
        _close(device, given.image)
        device, driver, found["after_kill"] = _start(given.image, settings, names=given.names)
        driver.log_no_more()
        for number in range(_YOUNG):
            put(driver, ROOT_INODE, b"younger %d" % number, b"y" * 5000)
        driver.sync()
        _end(driver)
        _cut(device, given.image)
        device, driver, found["start"] = _start(
            given.image, settings, names=given.names if given.files else 0
        )
        driver.engine.namespace.lookup(ROOT_INODE, b"younger 1")
        found["start"] |= driver.engine.reconcile.describe()
        if given.files:
            begun_s = time.monotonic()
            settle(driver)
            found["compared_s"] = time.monotonic() - begun_s
            forget_log(device.pool_fds, Syscalls())
            driver.sync()
            _end(driver)
            _cut(device, given.image)
            device, driver, found["rebuild_start"] = _start(
                given.image, settings, names=given.names
            )
        _end(driver)
        device.close()
        wait_released(str(given.image))
    finally:
        given.image.unlink()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
