"""Reads the next blocks of a chain into the page cache while a client loads the first ones.

An open tells what the client will open next (kvfs/core/chains.py). In an idle moment, once the open
is answered, it is decided what of that is read; a thread of the drive has the kernel read it. So
neither the client nor the loop waits for it, on both data paths: both read through the same cache.

Nothing is read ahead for a client that reads past the cache (O_DIRECT); of blocks that the client
may not read; on a drive that is slow; and while something on the machine waits for memory.
"""

import errno
import functools
import math
import operator
import os
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, Self

from kvfs.core.account import TenantId
from kvfs.core.blocks_ahead import BlockAhead, Got
from kvfs.core.chains import LearnedChains
from kvfs.core.errors import Damaged
from kvfs.core.inode_rules import surely_may
from kvfs.core.lifecycle import FINAL
from kvfs.core.types import ROOT_INODE, InodeNo, InodeRecord
from kvfs.machine.hardware import memory_pressure
from kvfs.pool.pool import Pool
from kvfs.pool.rules.paths import reaches
from kvfs.pool.space.device_probe import DeviceProbe

#: How far a client is read ahead of: what an NVMe drive reads in some ten milliseconds.
DEPTH_BYTES: Final = 32 << 20
#: And no more blocks than that, as small ones come with a cost each.
DEPTH_MAX: Final = 16
#: Opens that wait for an idle moment; the oldest of more is left out.
WAITING_MAX: Final = 256
#: The kernel may cut one request to the device's read-ahead window, by default 128 KiB
#: (force_page_cache_ra, mm/readahead.c).
_AT_ONCE_BYTES: Final = 128 << 10
_READ: Final = 0o4
_SEARCH: Final = 0o1
_ADAPTS_S: Final = 1.0
#: While something waits for memory for such a share of the time, pages would be taken from others.
_SCARCE_SHARE: Final = 0.01


class _Foretold(NamedTuple):
    """What the client with *uid*, who opened *ino*, will open next."""

    uid: int
    ino: InodeNo
    next: list[InodeNo]


class ReadAhead:
    """Reads ahead in one pool. All but ``_read`` is on the loop."""

    def __init__(
        self,
        pool: Pool,
        chains: LearnedChains,
        pressure: Callable[[], float] = memory_pressure,
        is_slow: Callable[[DeviceProbe], bool] = operator.attrgetter("is_slow"),
    ) -> None:
        """*pressure* returns for which share of the time something waits for memory.

        *is_slow* tells of a drive whether it answers later than it should.
        """
        self._pool = pool
        self._chains = chains
        self._pressure = pressure
        self._is_slow = is_slow
        self._leaders: Final = pool.rules.leases.processes.servers.leaders
        self._waiting: deque[_Foretold] = deque(maxlen=WAITING_MAX)
        self._is_scarce = False
        self._adapted_s = -math.inf

    @classmethod
    def wanted(cls, pool: Pool) -> Self | None:
        """Return what reads ahead in *pool*; None if its settings want nothing of the kind."""
        return None if pool.open.chains is None else cls(pool, pool.open.chains)

    def opened(self, ino: InodeNo, size_bytes: int, flags: int, uid: int, tid: int) -> None:
        """Note that thread *tid* of *uid* opened block *ino*, of *size_bytes*, with *flags*.

        Calls no device, reads no index and raises nothing: the open is not answered yet.
        """
        if flags & os.O_DIRECT:
            return
        chains = self._chains
        chains.ahead.opened(ino)
        # A process loads with several threads; in another pid namespace all of a user's are one.
        client = self._leaders.get(tid, tid) << 32 | uid
        depth = min(DEPTH_MAX, max(1, DEPTH_BYTES // max(1, size_bytes)))
        following = chains.links.opened(client, ino, depth)
        if following and chains.ahead.is_tried():
            if not self._waiting:
                self._pool.background.submit(self._begin_all)
            self._waiting.append(_Foretold(uid, ino, following))

    def run_due(self, now_s: float) -> None:
        """Give up what nobody uses, and learn whether memory is scarce."""
        self._chains.ahead.expire(now_s)
        for threads in self._pool.background.drives.all:
            threads.ahead.run_ends()
        if now_s - self._adapted_s >= _ADAPTS_S:
            self._adapted_s = now_s
            self._is_scarce = self._pressure() >= _SCARCE_SHARE

    def _begin_all(self) -> None:
        """Have read what is foretold of all opens that wait."""
        while self._waiting:
            foretold = self._waiting.popleft()
            if not self._is_scarce:
                self._begin(foretold)
        for threads in self._pool.background.drives.all:
            threads.ahead.hand_over()

    def _begin(self, foretold: _Foretold) -> None:
        pool, now_s = self._pool, self._pool.monotonic_s()
        opened = pool.index.inode_or_miss(foretold.ino)
        tenant = pool.space.accounts.tenants[foretold.uid]
        for ino in foretold.next:
            record = pool.index.inode_or_miss(ino)
            if record is None or record.state not in FINAL:
                return  # the chain ends here
            if opened is not None and self._may_read(foretold.uid, opened, record):
                self._ask(ino, record.size_bytes, tenant, now_s)

    def _ask(self, ino: InodeNo, size_bytes: int, tenant: TenantId, now_s: float) -> None:
        pool, memory = self._pool, self._pool.extents.memory
        if memory is not None and ino in memory:
            return
        try:
            if self._is_slow(pool.space.probes.of(ino)):
                return
        except Damaged:
            return  # its drive has failed
        block = self._chains.ahead.ask(ino, size_bytes, tenant, now_s)
        if block is not None:
            pool.background.of(ino).ahead.submit(functools.partial(self._read, block))

    def _may_read(self, uid: int, opened: InodeRecord, record: InodeRecord) -> bool:
        """Whether *uid*, who just opened the file with *opened*, may read the one with *record*.

        Who may open one file may open another one of the same owner, group and mode beside it. Of
        all others it must be so whatever the groups of *uid* are, which are not known.
        """
        alike = (opened.uid, opened.gid, opened.mode) == (record.uid, record.gid, record.mode)
        if not (alike or surely_may(record, uid, _READ)):
            return False
        searched = {ROOT_INODE: True, opened.parent: True}
        may_search = functools.partial(surely_may, uid=uid, right=_SEARCH)
        return reaches(self._pool.index, record.parent, may_search, searched)

    def _read(self, block: BlockAhead) -> None:
        """Have the kernel read *block*, in the thread, unless its client was faster."""
        if block.got is not Got.ASKED:
            return
        block.got = Got.NOTHING
        calls = self._pool.syscalls
        try:
            fd = self._pool.extents.open(block.ino, os.O_RDONLY)
        except (Damaged, OSError):
            return  # it was evicted meanwhile
        try:
            if self._is_cached(fd, block.size_bytes):
                block.got = Got.CACHED
                return
            block.got = Got.READ
            for at_bytes in range(0, block.size_bytes, _AT_ONCE_BYTES):
                calls.posix_fadvise(fd, at_bytes, _AT_ONCE_BYTES, os.POSIX_FADV_WILLNEED)
        except OSError:
            block.got = Got.NOTHING
        finally:
            calls.close(fd)

    def _is_cached(self, fd: int, size_bytes: int) -> bool:
        """Whether the first and the last byte are in memory; what lies between is, as a rule."""
        byte = bytearray(1)
        try:
            for at_bytes in (0, max(0, size_bytes - 1)):
                self._pool.syscalls.preadv(fd, [byte], at_bytes, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP):
                return False  # it is not, or this file system cannot tell
            raise
        return True
