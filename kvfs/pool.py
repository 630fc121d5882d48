"""One open pool: the device, its index and extents, and what the engine's parts share.

``Pool`` opens and closes these in order and owns the counters; what the operations mean is the
business of namespace.py, blocks.py and attributes.py.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from kvfs.background import Background
from kvfs.config import Settings
from kvfs.damage import Damage
from kvfs.devices import Device
from kvfs.errors import NoSpace
from kvfs.eviction import policy_named
from kvfs.extents import Extents
from kvfs.graves import GRAVE_S, Graves
from kvfs.heat import Heat
from kvfs.heat_scan import HeatScan
from kvfs.holdings import Holdings
from kvfs.identities import Identities
from kvfs.index import Index
from kvfs.index_place import index_path
from kvfs.inode_numbers import InodeNumbers
from kvfs.lifecycle import SETTLED
from kvfs.makers import Makers
from kvfs.open_inodes import OpenInode, OpenInodes
from kvfs.pins import Pins
from kvfs.policies import Policies
from kvfs.ready import ReadyQueue
from kvfs.records import UNFINISHED_MAX, Counters
from kvfs.run_state import distrust_index, read_run_state, write_run_state
from kvfs.space import Space
from kvfs.syscalls import Syscalls
from kvfs.types import InodeNo, InodeRecord, Sequence

if TYPE_CHECKING:
    from kvfs.index_transaction import WriteTransaction


#: No inode has this number.
_NOBODY: Final = InodeNo(0)


def _tell_nobody(_opened: OpenInode) -> None:
    """Stand in while no data path is there."""


class Pool:
    """The parts of one mounted pool. Everything runs on one thread unless it says otherwise."""

    def __init__(
        self,
        device: Device,
        settings: Settings,
        *,
        syscalls: Syscalls | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the index and extents of *device*. Raises IndexDamaged, FormatUnknown, OSError."""
        self.device = device
        self.settings = settings
        self.syscalls = syscalls if syscalls is not None else Syscalls()
        self.clock_ns = clock_ns
        self.monotonic_s = monotonic_s
        with contextlib.ExitStack() as stack:
            self.index = Index(
                index_path(device.pool_fd),
                map_size_bytes=settings.index_map_bytes,
                preallocate_bytes=settings.index_preallocate_bytes,
                read_only=settings.read_only,
                syscalls=self.syscalls,
            )
            stack.callback(self.index.close)
            self.numbers = InodeNumbers(device.pool_fd, self.syscalls, read_only=settings.read_only)
            stack.callback(self.numbers.close)
            self.extents = Extents(device.pool_fd, self.syscalls, device.fs_type)
            stack.callback(self.extents.close)
            self.damage = Damage(self.index, read_only=settings.read_only)
            self.counters = self.index.counters()
            capacity_bytes = settings.capacity_bytes or device.capacity_bytes
            self.space = Space(capacity_bytes, self.counters.used_bytes)
            self.background = Background(settings.unlink_queue_max)
            stack.callback(self.background.stop)
            self.ready = ReadyQueue(
                self.extents, self.numbers, self.background, self.space, settings
            )
            self.open_inodes = OpenInodes()
            #: Drafts and blocks being rewritten, which the index lists beside the counters.
            self.unfinished: set[InodeNo] = set()
            #: Blocks whose name went because their bytes were damaged or could not be kept.
            self.dismissed = 0
            self.identities = Identities(self.extents, self.background)
            self.graves = Graves(self.space, self.identities.erase)
            makers = Makers()
            stack.callback(makers.close)
            self.holdings = Holdings(makers, settings.lease_s)
            self.heat = Heat(
                device.pool_fd,
                self.syscalls,
                epoch=device.epoch,
                read_only=settings.read_only,
                policy=policy_named(settings.eviction),
                now_s=clock_ns() // 10**9,
            )
            self.heat_scan = HeatScan(self)
            self.policies = Policies(self.index, settings.policies)
            self.pins = Pins(self.index)
            #: Told each inode whose last handle is closed, before its extent may go.
            self.freed: Callable[[OpenInode], None] = _tell_nobody
            #: Gives up finished drafts that lost their name, when their room is needed.
            self.forget_nameless: Callable[[], None] = self.graves.give_way
            #: The boot in which the pool ran last: makers of another one are dead.
            self.former_boot_id = read_run_state(device.pool_fd, self.syscalls).boot_id
            if not settings.read_only:
                write_run_state(device.pool_fd, self.syscalls, clean=False)
            self._parts = stack.pop_all()

    def close(self, *, settled: bool = True, swept: bool = True) -> None:
        """Stop: everything queued is done, index and extents durable. Raises OSError.

        Not *settled*, the index holds drafts and the pool counts as not stopped cleanly; not
        *swept*, the next start looks for strays.
        """
        try:
            self.graves.give_way()
            self.background.drain()  # what is ordered becomes ready first
            self.ready.give_way()
            self.background.drain()
            if not self.settings.read_only:
                self.heat.save()
                self._make_durable()
                if settled:
                    strays = self.background.failures > 0 or not swept
                    write_run_state(self.device.pool_fd, self.syscalls, clean=True, strays=strays)
        finally:
            self._parts.close()

    def _make_durable(self) -> None:
        """Sync index and extents; who believes a clean stop believes every byte of them.

        After a failed sync the page cache is no witness any more: the kernel may have dropped
        what it could not write. The next start then rebuilds from what is whole on the device.
        """
        try:
            self.index.settle()
            self.sync()
        except (NoSpace, OSError):
            with contextlib.suppress(OSError):
                distrust_index(self.device.pool_fd, self.syscalls)
            raise

    def sync(self) -> None:
        """Make index, extents and identities durable; it blocks, and belongs in a thread.

        Before it ``background.hurry`` writes the identities that are queued, from which a rebuild
        starts, and ``index.settle`` commits what waits. Raises OSError.
        """
        self.index.sync()
        self.syscalls.syncfs(self.device.pool_fd)

    def require_space(self, size_bytes: int) -> None:
        """Make room for *size_bytes* more data from what is held for convenience.

        Raises NoSpace when the data alone leave no room.
        """
        space = self.space
        if size_bytes > space.free_bytes - space.ready_bytes:
            self.ready.give_way()
        if size_bytes > space.free_bytes:
            self.graves.give_way()
        if size_bytes > space.free_bytes:
            self.forget_nameless()
        space.require(size_bytes)

    def note_allocated(self, opened: OpenInode, allocated_bytes: int) -> None:
        """Account what an open extent holds now."""
        self.space.extra_bytes += allocated_bytes - opened.allocated_bytes
        opened.allocated_bytes = allocated_bytes

    def leave(self, opened: OpenInode, *, writer: bool) -> None:
        """Count one handle less; the last one closes the extent, and unlinks a nameless one."""
        if not self.open_inodes.leave(opened, writer=writer):
            return
        self.unfinished.discard(opened.ino)  # the index learns it with the next one
        self.freed(opened)
        if opened.fd >= 0:
            self.syscalls.close(opened.fd)
            opened.fd = -1
        if opened.gone is not None:
            self._bury(opened, opened.gone)

    def _bury(self, opened: OpenInode, record: InodeRecord) -> None:
        """Erase what nobody has open any more; what lost its name just now is kept for a moment.

        A LOOKUP before that may still send its OPEN: two misses in a row would be ESTALE.
        """
        age_s = (self.clock_ns() - record.ctime_ns) / 1e9
        if record.state in SETTLED and not opened.torn and 0 <= age_s < GRAVE_S:
            record = record._replace(allocated_bytes=opened.allocated_bytes)
            self.graves.dig(opened.ino, record, self.monotonic_s())
            return
        self.space.extra_bytes -= opened.allocated_bytes
        self.identities.erase(opened.ino, record)

    def next_sequence(self) -> Sequence:
        """Return a number higher than every one given out before (written with the counters)."""
        return Sequence(self.counters.sequence + 1)

    @contextlib.contextmanager
    def change(
        self,
        counters: Counters,
        *,
        begun: InodeNo = _NOBODY,
        finished: InodeNo = _NOBODY,
        lasting: bool = True,
    ) -> "Iterator[WriteTransaction]":
        """One index transaction that ends with the pool's counters being *counters*.

        *begun* is open for writing from now on, *finished* no more: the next start after a kill
        need not search for drafts. In memory all this holds only after the commit, so that a
        failed one changes nothing. Not *lasting*, a killed process may lose it (index.py).
        """
        with self.index.write(lasting=lasting) as txn:
            yield txn
            txn.put_counters(counters)
            if begun or finished:
                txn.put_unfinished(self._unfinished_after(begun, finished))
        if begun:
            self.unfinished.add(begun)
        if finished:
            self.unfinished.discard(finished)
        self.counters = counters
        self.space.recorded_bytes = counters.used_bytes

    def _unfinished_after(self, begun: InodeNo, finished: InodeNo) -> set[InodeNo]:
        if len(self.unfinished) > UNFINISHED_MAX + 1:
            return self.unfinished  # too many to be listed, with one more or less
        return (self.unfinished | {begun}) - {finished, _NOBODY}
