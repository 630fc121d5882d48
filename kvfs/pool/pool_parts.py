"""The parts of a pool, in groups by idea. The pool makes them; others take a group, or a part."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvfs.core.account import Accounts
from kvfs.core.chains import LearnedChains
from kvfs.core.drives import ByDrive, Numbering
from kvfs.core.headroom import Headroom
from kvfs.core.index_room import NodeShares
from kvfs.core.records import DriveCount
from kvfs.core.settings import Settings
from kvfs.core.types import FIRST_DRIVE, NO_INODE, DeviceState, DriveNo, InodeNo
from kvfs.devices import Device
from kvfs.pool.durable.final_bytes import FinalBytes, PoolSync
from kvfs.pool.durable.identities import Identities
from kvfs.pool.durable.index_log import IndexLog
from kvfs.pool.durable.not_durable import UndurableBlocks
from kvfs.pool.open.open_inodes import OpenInodes
from kvfs.pool.open.open_notes import OpenNotes
from kvfs.pool.open.placement import Placement
from kvfs.pool.open.ports import Kernel
from kvfs.pool.open.probation import Probation
from kvfs.pool.open.ready_by_drive import ReadyByDrive
from kvfs.pool.rules.hints import Hints
from kvfs.pool.rules.leases import Leases
from kvfs.pool.rules.policies import Policies, TenantRules, UnitRoots
from kvfs.pool.rules.ranks import Pins, Ranks
from kvfs.pool.space.device_probe import DeviceProbe
from kvfs.pool.space.drive import PoolDrive
from kvfs.pool.space.space import (
    DeviceRoom,
    LeavingSpace,
    Space,
    SpaceFigures,
    StayBounds,
    WholeSpace,
)
from kvfs.pool.space.unlink_queue import Strays, UnlinkQueue
from kvfs.storage.background import Background
from kvfs.storage.extent_bytes import FinalChecksum
from kvfs.storage.extents import Extents
from kvfs.storage.heat import Heat
from kvfs.storage.inode_numbers import InodeNumbers
from kvfs.storage.kept_aside import StrayFiles
from kvfs.storage.outliving import Notes, UndurableTable
from kvfs.storage.syscalls import Syscalls

#: So many drives have what is of the whole pool: how warm its blocks are.
_KEPT_TWICE: Final = 2


@dataclass(frozen=True)
class SpaceParts:
    """What counts space, and what gives it back."""

    #: What is taken of the whole pool.
    taken: SpaceFigures
    #: Each drive counts for itself, and gives back for itself.
    drives: ByDrive[PoolDrive]
    #: What is taken of the first drive.
    first: Space
    #: What is taken of the drive that holds an inode's file.
    of: Callable[[InodeNo], Space]
    #: Whether each drive answers.
    probes: ByDrive[DeviceProbe]
    bounds: StayBounds
    accounts: Accounts
    node_shares: NodeShares
    strays: Strays

    @property
    def serving(self) -> Sequence[PoolDrive]:
        """The drives that have not failed."""
        return [drive for drive in self.drives.all if not drive.has_failed]

    @property
    def kept_on(self) -> Sequence[PoolDrive]:
        """The drives that have copies of the log, RUN and HEAT: two, so that one may be lost."""
        return self.serving[:_KEPT_TWICE]

    def on_each(self, do: Callable[[PoolDrive], None]) -> None:
        """Call *do* with each drive that has not failed."""
        for drive in self.serving:
            do(drive)

    def close(self) -> None:
        """Wait for the probes under way."""
        for probe in self.probes.all:
            probe.close()


def space_parts(
    device: Device,
    settings: Settings,
    counts: Sequence[DriveCount],
    numbers: InodeNumbers,
    extents: Extents,
    background: Background,
    syscalls: Syscalls,
    accounts: Accounts,
    monotonic_s: Callable[[], float],
) -> SpaceParts:
    """Return the first group: all others count in it. Raises OSError.

    *counts*: what blocks hold of each drive, by number.
    """
    probes = _probes(device, settings, syscalls, monotonic_s)
    drives = ByDrive(list(_drives(device, settings, counts, extents, background, probes)))
    spaces = ByDrive([drive.space for drive in drives.all])
    several = WholeSpace(lambda: _figures(drives.all))
    taken = several if drives.all[1:] else spaces.all[FIRST_DRIVE]
    files = StrayFiles(device.pool_fds, syscalls, extents)
    strays = Strays(
        *(files, spaces, ByDrive([drive.unlink_queue for drive in drives.all])),
        grace_s=settings.stray_grace_s,
        most=settings.strays_max,
    )
    strays.load()
    return SpaceParts(
        taken=taken,
        drives=drives,
        first=spaces.all[FIRST_DRIVE],
        of=spaces.of,
        probes=ByDrive(probes),
        bounds=StayBounds(
            lambda: taken.usable_bytes,
            lease_max=settings.lease_max,
            pin_share=settings.pin_share,
        ),
        accounts=accounts,
        node_shares=NodeShares(numbers.is_new, accounts.names),
        strays=strays,
    )


def _figures(drives: Sequence[PoolDrive]) -> list[Space | LeavingSpace]:
    """Return what counts in the pool's capacity: a drive that is being emptied by what is left.

    If no other one serves, it takes blocks all the same (``Placement``).
    """
    serving = [drive for drive in drives if not drive.has_failed]
    if all(drive.is_draining for drive in serving):
        return [drive.space for drive in serving]
    return [LeavingSpace(one.space) if one.is_draining else one.space for one in serving]


def _probes(
    device: Device, settings: Settings, syscalls: Syscalls, monotonic_s: Callable[[], float]
) -> list[DeviceProbe]:
    """Return a probe for each drive, by number. Raises OSError."""
    drives, probes = (device, *device.more), list[DeviceProbe]()
    for number, drive in enumerate(drives):
        name = f"drive {number}" if device.more else "the device"
        probe = DeviceProbe(
            *(drive.pool_fd, settings.device_silent_s, monotonic_s, syscalls),
            name=name,
            writes=not settings.read_only,
        )
        if drive.why_missing:
            gone = DeviceState.REMOVED if drive.header.is_removed else DeviceState.MISSING
            probe.give_up(drive.why_missing, gone)
        probes.append(probe)
    return probes


def _drives(
    device: Device,
    settings: Settings,
    counts: Sequence[DriveCount],
    extents: Extents,
    background: Background,
    probes: Sequence[DeviceProbe],
) -> Iterator[PoolDrive]:
    """Yield the pool's drives, of which the index counts *counts*, by number."""
    sources, numbering = (device, *device.more), Numbering(len(probes))
    for number, (source, capacity_bytes, count, probe) in enumerate(
        zip(sources, _capacities_bytes(device, settings), counts, probes, strict=True)
    ):
        space, ino = (
            Space(capacity_bytes, count.used_bytes),
            numbering.inode(DriveNo(number), NO_INODE),
        )
        yield PoolDrive(
            number=DriveNo(number),
            ino=ino,
            probe=probe,
            space=space,
            headroom=Headroom(capacity_bytes),
            device_room=DeviceRoom(space, functools.partial(_free_bytes, source, number, extents)),
            unlink_queue=UnlinkQueue(background, ino, space),
            is_draining=source.header.is_draining,
        )


def _free_bytes(source: Device, number: int, extents: Extents) -> int:
    """Return what can still be allocated on drive *number*, less what is to move there."""
    memory = extents.memory
    return source.free_bytes() - (memory.held_for_bytes(DriveNo(number)) if memory else 0)


def _capacities_bytes(device: Device, settings: Settings) -> list[int]:
    """Return what each drive may hold: of a capacity that is set, the part that is its own."""
    if not settings.capacity_bytes or device.missing:
        return list(device.capacities_bytes)
    whole_bytes = device.capacity_bytes
    return [settings.capacity_bytes * each // whole_bytes for each in device.capacities_bytes]


@dataclass(frozen=True)
class OpenParts:
    """What is open, and what drafts begin with."""

    inodes: OpenInodes
    notes: OpenNotes
    ready: ReadyByDrive
    placement: Placement
    #: None: nothing is in memory, and nothing comes.
    probation: Probation | None
    #: None: nothing is read ahead of its use.
    chains: LearnedChains | None

    def has_in_memory(self, ino: InodeNo) -> bool:
        """Whether *ino*'s bytes are in memory alone."""
        return self.probation is not None and ino in self.probation

    @property
    def followers(self) -> list[Placement | Probation | LearnedChains]:
        """Those of them that follow the index: the first two where a block has several places."""
        several = [self.placement] if self.ready.queues.all[1:] else []
        return [*several, *(each for each in (self.probation, self.chains) if each is not None)]


def open_parts(
    extents: Extents,
    numbers: InodeNumbers,
    background: Background,
    drives: ByDrive[PoolDrive],
    settings: Settings,
    kernel: Kernel,
    *,
    notes: Notes,
    monotonic_s: Callable[[], float],
) -> OpenParts:
    """Return the second group."""
    inodes, probation = OpenInodes(), None
    ready = ReadyByDrive(
        extents, numbers, background, drives, settings, kernel, inodes, monotonic_s
    )
    if extents.memory is not None and not settings.read_only:
        most_bytes = settings.probation_bytes
        probation = Probation(extents.memory, extents, numbers, background, inodes, most_bytes)
    learns = settings.prefetch == "learned" and not settings.read_only
    return OpenParts(
        *(inodes, OpenNotes(notes), ready, Placement(drives, ready), probation),
        LearnedChains() if learns else None,
    )


@dataclass(frozen=True)
class RuleParts:
    """What may stay, and for how long."""

    policies: Policies
    pins: Pins
    hints: Hints
    leases: Leases
    heat: Heat
    ranks: Ranks
    tenants: TenantRules
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
