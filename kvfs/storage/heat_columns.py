"""Whose each block is, and what hints say of it: beside the rows of the heat; only in memory.

There are no tenants' rows before a second tenant has a block. A tenant has a slot, a number for the
row, which takes 2 bytes. Slots are bounded: tenants beyond that share one, and are one to eviction.

What hints say takes 6 bytes a row, and none before the first hint. The rows of blocks that are
stored later are made when one of them gets a hint.
"""

from collections.abc import Collection, Iterable
from enum import IntEnum
from typing import Final

import numpy as np

from kvfs.core.account import ROOT, Entitlements, TenantId, is_directory
from kvfs.core.block_owners import Owners
from kvfs.core.eviction_policy import Retention

#: Some arrays of 8 bytes a slot are copied and summed for each plan.
SLOTS_MAX: Final = 1 << 10


class HeatTenants:
    """The rows of one heat. A scan in a thread may read them meanwhile."""

    def __init__(self, first: TenantId, stored_bytes: int, entitlements: Entitlements) -> None:
        """All blocks are of the tenant *first*, and hold *stored_bytes*."""
        self._entitlements = entitlements
        #: The slots of the tenants that have one of their own.
        self.slots = {first: 0}
        #: The tenant of each slot. The last slot is for all tenants that have none of their own.
        self._tenants = [first]
        self._rows = np.zeros(0, np.uint16)
        self._stored_bytes = np.zeros(SLOTS_MAX, np.int64)
        #: What other tenants keep from eviction counts for them; it is not in ``_stored_bytes``.
        self._lent = dict[int, int]()
        self._gone_bytes = np.zeros(SLOTS_MAX, np.int64)
        self._weight = np.ones(SLOTS_MAX, np.float64)
        # A memoryview is faster where one number is meant.
        self._slot_of = self._rows.data
        self._stored = self._stored_bytes.data
        self._gone = self._gone_bytes.data
        self._stored[0] = stored_bytes
        self._weight[0] = entitlements.of(first).weight

    def enter(self, row: int, tenant: TenantId, size_bytes: int, rows: int) -> None:
        """Note that the block in *row* of *rows* is the *tenant*'s, and holds *size_bytes*."""
        slot = self.slots.get(tenant)
        if slot is None:
            slot = self._slot_for(tenant)
        if row >= len(self._slot_of):
            self._rows = np.pad(self._rows, (0, rows - len(self._rows)))
            self._slot_of = self._rows.data
        self._slot_of[row] = slot
        self._stored[slot] += size_bytes

    def leave(self, row: int, size_bytes: int) -> None:
        """Note that the block in *row*, of *size_bytes*, gets another size or tenant."""
        self._stored[self._slot_at(row)] -= size_bytes

    def drop(self, row: int, size_bytes: int) -> None:
        """Note that the block in *row*, of *size_bytes*, is gone."""
        slot = self._slot_at(row)
        self._stored[slot] -= size_bytes
        self._gone[slot] += size_bytes

    def weigh(self, tenant: TenantId) -> None:
        """Give *tenant*, if it has a slot of its own, the weight that it is entitled to now."""
        if (slot := self.slots.get(tenant)) is not None:
            self._weight[slot] = self._entitlements.of(tenant).weight

    def lend(self, kept: Iterable[tuple[int, int, Collection[TenantId]]]) -> None:
        """Note who keeps which blocks from eviction now: rows, bytes and tenants of each.

        A block counts for its own tenant only while no other one keeps it. Readers are users, so
        a directory's blocks count for it whoever reads them.
        """
        for slot, size_bytes in self._lent.items():
            self._stored[slot] += size_bytes
        self._lent.clear()
        for row, size_bytes, holders in kept:
            slot = self._slot_at(row)
            if is_directory(self._tenants[slot] if slot < len(self._tenants) else ROOT):
                continue
            if any(self.slots.get(holder, SLOTS_MAX - 1) != slot for holder in holders):
                self._lent[slot] = self._lent.get(slot, 0) + size_bytes
        for slot, size_bytes in self._lent.items():
            self._stored[slot] -= size_bytes

    def columns(self, idle_stamp: int) -> Owners:
        """Return the columns for a scan; *idle_stamp* as there."""
        return Owners(
            self._rows,
            self._stored_bytes,
            self._gone_bytes,
            self._weight,
            idle_stamp,
            self._stored_bytes.copy(),
            self._gone_bytes.copy(),
        )

    def _slot_at(self, row: int) -> int:
        return self._slot_of[row] if row < len(self._slot_of) else 0

    def _slot_for(self, tenant: TenantId) -> int:
        """Return a slot for a new tenant: one that is free, or whose tenant stores nothing now."""
        slot = len(self._tenants)
        if slot < SLOTS_MAX - 1:
            self._tenants.append(tenant)
        else:
            free = self._stored_bytes[: SLOTS_MAX - 1] == 0
            free[list(self._lent)] = False
            unused = np.flatnonzero(free)
            if not len(unused):
                return SLOTS_MAX - 1
            slot = int(unused[0])
            former, self._tenants[slot] = self._tenants[slot], tenant
            self.slots.pop(former, None)
        self.slots[tenant] = slot
        self._weight[slot] = self._entitlements.of(tenant).weight
        return slot


#: The end of a hint without one.
ALWAYS_S: Final = (1 << 32) - 1


class Told(IntEnum):
    """What a client told by the hints socket, which counts before attributes."""

    NOTHING = 0
    RETAIN = 1
    DEMOTE = 2


class HeatHints:
    """The rows of one heat. A scan in a thread may read them meanwhile."""

    def __init__(self) -> None:
        self._priority = np.zeros(0, np.uint8)
        self._until_s = np.zeros(0, np.uint32)
        self._told = np.zeros(0, np.uint8)

    def set(self, row: int, priority: int, until_s: int, told: Told, rows: int) -> None:
        """Note a hint for *row* of *rows*; *until_s* is of the clock of ages."""
        if row >= len(self._told):
            more = (0, rows - len(self._told))
            self._priority = np.pad(self._priority, more)
            self._until_s = np.pad(self._until_s, more)
            self._told = np.pad(self._told, more)
        self._priority[row] = priority
        self._until_s[row] = min(until_s, ALWAYS_S)
        self._told[row] = told

    def copy(self, row: int, to: int, rows: int) -> None:
        """Let what was said of *row* hold for row *to*, too, of *rows*."""
        if row < len(self._told):
            told = Told(self._told[row])
            self.set(to, int(self._priority[row]), int(self._until_s[row]), told, rows)

    def clear(self, row: int) -> None:
        """Forget what was said of *row*."""
        if row < len(self._told):
            self._told[row] = self._priority[row] = self._until_s[row] = 0

    def told(self, row: int, now_s: int) -> Told:
        """Return what was told of *row* and counts still at *now_s*; row 0 is no block's."""
        if row >= len(self._told) or self._until_s[row] <= now_s:
            return Told.NOTHING
        return Told(self._told[row])

    def columns(self, now_s: int) -> Retention:
        """Return the rows for a scan at *now_s*."""
        return Retention(self._priority, self._until_s, now_s)
