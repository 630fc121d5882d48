"""Drafts that grow without asking: checked at every tick, and stopped when no space is left.

A passthrough writer allocates in the backing file system. What it takes beyond its reserve is found
here, and space for its next writes is kept free. If it took space that was not there, and nothing
can be evicted, or its tenant may keep no more from eviction, it is stopped: its bytes are freed,
its close is ENOSPC, its name is removed.

A draft stores nothing yet, so eviction for it would take from others alone, whatever they have.
Hence the space kept free for what such drafts may take next, and what they take, ends where their
tenant may keep no more from eviction (``Accounts.left_bytes``).
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from kvfs.core.account import ROOT, SPARE_SHARE, TenantId
from kvfs.core.errors import NoSpace, NotAtHand
from kvfs.core.headroom import UNWATCHED_BYTES, lacking_bytes
from kvfs.core.lifecycle import State, is_temporary
from kvfs.core.types import InodeNo
from kvfs.engine.eviction.reclaim import Reclaim
from kvfs.pool.allocator import Allocator
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.pool import Pool
from kvfs.pool.pool_parts import SpaceParts
from kvfs.pool.rules.policies import TenantRules
from kvfs.pool.space.drive import PoolDrive
from kvfs.storage.index import Index


class GrownDrafts:
    """The drafts of one moment that have grown, or may grow, without asking."""

    def __init__(
        self,
        index: Index,
        space: SpaceParts,
        tenants: TenantRules,
        written: Iterable[OpenInode],
        now_s: float,
    ) -> None:
        """Sum up what of *written* each tenant holds at *now_s*."""
        self._space: Final = space
        self._growing: Final = [
            each for each in written if each.taken_unasked > 0 or each.unreserved
        ]
        self._held: Final = Counter[TenantId]()
        self._tenant_of: Final[dict[OpenInode, TenantId]] = {}
        space.accounts.lately.remember(now_s)
        for opened in self._growing:
            record = opened.gone or index.inode_or_miss(opened.ino)
            if record is not None:
                self._tenant_of[opened] = tenant = tenants.of(record)
                self._held[tenant] += opened.allocated_bytes

    def may_take_bytes(self, opened: OpenInode, wanted_bytes: int) -> int:
        """Return how many of *wanted_bytes* may be kept free for *opened*, and count them."""
        tenant = self._tenant_of.get(opened)
        bound_bytes = None if tenant is None else self._bound_bytes(tenant)
        if tenant is None or bound_bytes is None:
            return wanted_bytes
        may_bytes = min(wanted_bytes, max(0, bound_bytes - self._held[tenant]))
        self._held[tenant] += may_bytes
        return may_bytes

    def to_stop(self) -> list[OpenInode]:
        """Return drafts, those that took most first, of tenants that hold more than they may.

        All others of a tenant go on, if it holds no more then. Root has no bound.
        """
        stopped: list[OpenInode] = []
        least_bytes = int(self._space.taken.usable_bytes * SPARE_SHARE)
        left = self._held.copy()
        for opened in sorted(self._growing, key=lambda each: each.taken_unasked, reverse=True):
            tenant = self._tenant_of.get(opened)
            if tenant is None or tenant == ROOT or not opened.taken_unasked:
                continue
            bound_bytes = self._bound_bytes(tenant)
            if bound_bytes is not None and left[tenant] > max(bound_bytes, least_bytes):
                left[tenant] -= opened.allocated_bytes
                stopped.append(opened)
        return stopped

    def _bound_bytes(self, tenant: TenantId) -> int | None:
        """Return how much *tenant* may keep in drafts; None: there is no bound."""
        accounts = self._space.accounts
        left_bytes = accounts.left_bytes(tenant, self._space.taken.usable_bytes)
        return None if left_bytes is None else left_bytes + accounts.drafts.by(tenant)


_log: Final = logging.getLogger(__name__)
#: Drafts checked in one tick, at 2 us each; if there are more, they take turns.
_LOOKS_A_TICK: Final = 512
#: States of a draft with a temporary name after its close; PUBLISHED if it got no lease.
_GIVEN_UP: Final = frozenset({State.LEASED, State.PUBLISHED, State.ORPHAN})


class OverrunWatch:
    """Checks the drafts that are open for writing."""

    def __init__(self, pool: Pool, allocator: Allocator, reclaim: Reclaim) -> None:
        self._pool = pool
        self._allocator = allocator
        self._growth = allocator.growth
        self._reclaim = reclaim
        self._skip = 0
        self.overruns = 0
        self.given_up = 0

    def run_due(self, now_s: float) -> None:
        """Check the drafts; stop some if they take more than the capacity."""
        pool = self._pool
        written = pool.open.inodes.written
        due = self._due()
        guesses, kept = dict[OpenInode, int](), dict[PoolDrive, int]()
        for opened in due:
            drive = pool.space.drives.of(opened.ino)
            if next_bytes := self._growth.measure(opened, now_s):
                guesses[opened] = next_bytes
            kept[drive] = max(kept.get(drive, 0), opened.outgrowing_bytes)
        lacking = self._within_shares(guesses)
        for drive in pool.space.drives.all:
            drive.space.lacking_bytes = max(lacking[drive], kept.get(drive, 0))
            if written and drive.space.unclaimed_bytes < 0:
                self._hold_the_bound(drive)

    def _within_shares(self, guesses: Mapping[OpenInode, int]) -> Counter[PoolDrive]:
        """Return how much of *guesses*, what drafts may take next, is kept free on each drive."""
        lacking, pool = Counter[PoolDrive](), self._pool
        if guesses:
            grown = self._grown()
            for opened, next_bytes in guesses.items():
                drive = pool.space.drives.of(opened.ino)
                lacking[drive] += grown.may_take_bytes(opened, next_bytes)
        return lacking

    def _grown(self) -> GrownDrafts:
        pool, written = self._pool, self._pool.open.inodes.written.values()
        return GrownDrafts(pool.index, pool.space, pool.rules.tenants, written, pool.monotonic_s())

    def look_at_closing(self, opened: OpenInode) -> None:
        """Count what *opened* took since the last check, before it is closed; stop some drafts.

        Otherwise drafts closed between two ticks could leave the pool above its capacity.
        """
        self._growth.measure(opened, self._pool.monotonic_s())
        drive = self._pool.space.drives.of(opened.ino)
        if drive.space.overstepped_bytes:
            self._hold_the_bound(drive)

    def look_at_removal(self, ino: InodeNo) -> None:
        """Count a draft that its writer removes, perhaps because the device refused its bytes.

        kvfs does not see a refused passthrough write. It can happen only after all of the reserve
        is written, and while there is little space.
        """
        pool = self._pool
        if (
            not pool.kernel.writers_run_free
            or pool.space.of(ino).unclaimed_bytes >= UNWATCHED_BYTES
        ):
            return
        record = pool.index.inode_or_miss(ino)
        if record is None or record.state not in _GIVEN_UP or not is_temporary(record.name):
            return
        usual_bytes = pool.open.ready.forecast.usual_bytes(record.parent)
        self.given_up += 0 < usual_bytes <= record.size_bytes

    def _hold_the_bound(self, drive: PoolDrive) -> None:
        pool = self._pool
        if drive.space.overstepped_bytes:
            for opened in self._grown().to_stop():
                self.stop(opened)
        try:
            self._allocator.require_space(0, drive)
        except NotAtHand:
            return  # the device is freeing some: the next tick looks again
        except NoSpace:
            # No draft is stopped for what it may take next, which is a guess.
            if drive.space.overstepped_bytes and not self._reclaim.hopeful(drive):
                self._stop_some(drive, list(pool.open.inodes.written.values()))

    def _due(self) -> list[OpenInode]:
        written = list(self._pool.open.inodes.written.values())
        if len(written) <= _LOOKS_A_TICK:
            return written
        start = self._skip % len(written)
        self._skip = start + _LOOKS_A_TICK
        return (written[start:] + written[:start])[:_LOOKS_A_TICK]

    def _stop_some(self, drive: PoolDrive, written: list[OpenInode]) -> None:
        """Stop drafts on *drive*, those that grew most first, until it is within its space."""
        space, drive_of = drive.space, self._pool.space.drives.of
        growing = [
            opened
            for opened in written
            if opened.taken_unasked > 0 and drive_of(opened.ino) is drive
        ]
        growing.sort(key=lambda opened: (opened.outgrown, opened.taken_unasked), reverse=True)
        for opened in growing:
            if not space.overstepped_bytes:
                return
            self.stop(opened)

    def stop(self, opened: OpenInode) -> bool:
        """Free the bytes of *opened*, whose close is ENOSPC; False if that must not be done."""
        if opened.overrun or not self._may_be_stopped(opened):
            return False
        space = self._pool.space.of(opened.ino)
        _log.warning("inode %#x outgrew the pool: its writer gets ENOSPC", opened.ino)
        opened.outrun()
        self._pool.open.notes.writing(opened)
        self.overruns += 1
        lacking = lacking_bytes(opened.outgrown, unreserved=opened.unreserved)
        space.lacking_bytes -= min(space.lacking_bytes, lacking)
        opened.is_stopped()
        self._growth.empty(opened)
        return True

    def _may_be_stopped(self, opened: OpenInode) -> bool:
        """Whether only the writer loses something: it is a draft under its first name, unread."""
        if opened.renamed or opened.readers or not opened.unfinished:
            return False
        if opened.gone is not None:
            return True
        record = self._pool.index.inode_or_miss(opened.ino)
        return record is not None and record.state == State.DRAFT  # a slab asked for its space
