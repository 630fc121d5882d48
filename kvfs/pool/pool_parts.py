"""The parts of a pool, in groups by idea. The pool makes them; others take a group, or a part."""

from dataclasses import dataclass, field

from kvfs.core.account import Accounts
from kvfs.core.headroom import Headroom
from kvfs.core.index_room import NodeShares
from kvfs.core.records import Counters
from kvfs.core.settings import Settings
from kvfs.devices import Device
from kvfs.pool.durable.final_bytes import FinalBytes, PoolSync
from kvfs.pool.durable.identities import Identities
from kvfs.pool.durable.index_log import IndexLog
from kvfs.pool.durable.not_durable import UndurableBlocks
from kvfs.pool.open.open_inodes import OpenInodes
from kvfs.pool.open.open_notes import OpenNotes
from kvfs.pool.open.ready_extents import ReadyExtents
from kvfs.pool.rules.hints import Hints
from kvfs.pool.rules.leases import Leases
from kvfs.pool.rules.policies import Policies, UnitRoots
from kvfs.pool.rules.ranks import Pins, Ranks
from kvfs.pool.space.space import DeviceRoom, Space, StayBounds
from kvfs.pool.space.unlink_queue import Strays, UnlinkQueue
from kvfs.storage.background import Background
from kvfs.storage.extent_bytes import FinalChecksum
from kvfs.storage.extents import Extents
from kvfs.storage.heat import Heat
from kvfs.storage.inode_numbers import InodeNumbers
from kvfs.storage.kept_aside import StrayFiles
from kvfs.storage.outliving import UndurableTable
from kvfs.storage.syscalls import Syscalls


@dataclass(frozen=True)
class SpaceParts:
    """What counts space, and what gives it back."""

    taken: Space
    headroom: Headroom
    bounds: StayBounds
    device_room: DeviceRoom
    accounts: Accounts
    node_shares: NodeShares
    unlink_queue: UnlinkQueue
    strays: Strays


def space_parts(
    device: Device,
    settings: Settings,
    counters: Counters,
    numbers: InodeNumbers,
    extents: Extents,
    background: Background,
    syscalls: Syscalls,
    accounts: Accounts,
) -> SpaceParts:
    """Return the first group: all others count in it. Raises OSError."""
    capacity_bytes = settings.capacity_bytes or device.capacity_bytes
    taken = Space(capacity_bytes, counters.used_bytes)
    unlink_queue = UnlinkQueue(background, taken)
    files = StrayFiles(device.pool_fds, syscalls, extents)
    strays = Strays(
        *(files, taken, unlink_queue, background),
        grace_s=settings.stray_grace_s,
        most=settings.strays_max,
    )
    strays.load()
    return SpaceParts(
        taken=taken,
        headroom=Headroom(capacity_bytes),
        bounds=StayBounds(
            lambda: taken.usable_bytes,
            lease_max=settings.lease_max,
            pin_share=settings.pin_share,
        ),
        device_room=DeviceRoom(taken, device.free_bytes),
        accounts=accounts,
        node_shares=NodeShares(numbers.is_new, accounts.names),
        unlink_queue=unlink_queue,
        strays=strays,
    )


@dataclass(frozen=True)
class OpenParts:
    """What is open, and what drafts begin with."""

    inodes: OpenInodes
    notes: OpenNotes
    ready: ReadyExtents


@dataclass(frozen=True)
class RuleParts:
    """What may stay, and for how long."""

    policies: Policies
    pins: Pins
    hints: Hints
    leases: Leases
    heat: Heat
    ranks: Ranks
    units: UnitRoots = field(default_factory=UnitRoots)


@dataclass(frozen=True)
class DurableParts:
    """What the device does not have yet, and how it gets there."""

    not_durable: UndurableBlocks
    identities: Identities
    final_checksum: FinalChecksum
    final_bytes: FinalBytes
    syncs: PoolSync
    index_log: IndexLog
    undurable: UndurableTable
    #: Whether the last server kept ``undurable``: RUN is still the file that it wrote.
    undurable_known: bool
