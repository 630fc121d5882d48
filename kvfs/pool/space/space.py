"""How much of a drive's capacity is taken, and by what; of a pool: the sum of its drives.

Space is taken and given back on a drive (``Space``).

- ``recorded_bytes``: blocks, as recorded in the index.
- ``extra_bytes``: what open drafts and removed but open blocks hold beyond that.
- ``removed_bytes``: the part of these that recently removed blocks hold (departures.py).
- ``ready_bytes``: ready extents.
- ``ordered_bytes``: the part of these that a thread is making.
- ``stray_bytes``: files without an inode that are kept for a while (unlink_queue.py).
- ``pending_delete_bytes``: extents without an owner that are not unlinked yet.
- ``coming_bytes``: the part of these that the device's thread is unlinking.
- ``deleted_open_bytes``: the same, but somebody still has them open or mapped.
- ``pledged_bytes``: what writes in flight may still allocate.
- ``lacking_bytes``: a guess at what drafts will take beyond their reserve until the next check.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from kvfs.core.errors import NoSpace
from kvfs.core.sizes import format_size


class Space:
    """Accounts for the space of one drive. All figures are allocated bytes there."""

    def __init__(self, capacity_bytes: int, recorded_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        #: The capacity, or what the device can really hold (``DeviceRoom``).
        self.bound_bytes = capacity_bytes
        self.recorded_bytes = recorded_bytes
        self.extra_bytes = 0
        self.removed_bytes = 0
        self.ready_bytes = 0
        self.ordered_bytes = 0
        self.stray_bytes = 0
        self.pending_delete_bytes = 0
        self.coming_bytes = 0
        self.deleted_open_bytes = 0
        self.pledged_bytes = 0
        self.lacking_bytes = 0

    @property
    def usable_bytes(self) -> int:
        """What the drive can hold: its capacity, or what the device has if that is less."""
        return min(self.capacity_bytes, self.bound_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes of clients' data, without ready extents, which are given up on demand."""
        return self.recorded_bytes + self.extra_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that clients may store now, if ready extents are given up."""
        return max(0, self.unclaimed_bytes + self.ready_bytes)

    @property
    def unclaimed_bytes(self) -> int:
        """Bytes that are neither taken nor promised; below 0 if more is than the bound."""
        return self.bound_bytes - self.taken_bytes - self.pledged_bytes - self.lacking_bytes

    @property
    def taken_bytes(self) -> int:
        """Bytes in all extents."""
        gone_bytes = self.pending_delete_bytes + self.deleted_open_bytes + self.stray_bytes
        return self.recorded_bytes + self.extra_bytes + self.ready_bytes + gone_bytes

    @property
    def overstepped_bytes(self) -> int:
        """By how much taken and promised bytes exceed the bound, 0 if they fit."""
        return max(0, self.taken_bytes + self.pledged_bytes - self.bound_bytes)

    @property
    def overcommitted_bytes(self) -> int:
        """By how much all extents together exceed the capacity, 0 if they fit."""
        return max(0, self.taken_bytes - self.capacity_bytes)

    def require(self, size_bytes: int) -> None:
        """Raise NoSpace unless *size_bytes* more data fit."""
        if size_bytes > self.unclaimed_bytes + self.ready_bytes:
            raise NoSpace(
                f"{format_size(size_bytes)} do not fit: {format_size(self.free_bytes)} free"
            )


class SpaceFigures(Protocol):
    """How much is taken, and by what, to be read: of one drive, or of a whole pool."""

    @property
    def capacity_bytes(self) -> int:
        """What it may hold."""

    @property
    def bound_bytes(self) -> int:
        """The capacity, or what the device can really hold."""

    @property
    def usable_bytes(self) -> int:
        """What it can hold."""

    @property
    def used_bytes(self) -> int:
        """Bytes of clients' data."""

    @property
    def free_bytes(self) -> int:
        """Bytes that clients may store now."""

    @property
    def unclaimed_bytes(self) -> int:
        """Bytes that are neither taken nor promised."""

    @property
    def taken_bytes(self) -> int:
        """Bytes in all extents."""

    @property
    def overcommitted_bytes(self) -> int:
        """By how much all extents together exceed the capacity."""

    @property
    def recorded_bytes(self) -> int:
        """Bytes of blocks, as recorded in the index."""

    @property
    def removed_bytes(self) -> int:
        """Bytes of recently removed blocks."""

    @property
    def ready_bytes(self) -> int:
        """Bytes of ready extents."""

    @property
    def stray_bytes(self) -> int:
        """Bytes of files without an inode."""

    @property
    def pending_delete_bytes(self) -> int:
        """Bytes of extents that are to be unlinked."""

    @property
    def deleted_open_bytes(self) -> int:
        """Bytes of extents that are unlinked once nobody has them open."""


class LeavingSpace:
    """The figures of a drive that is being emptied: it has room for what it still holds alone."""

    free_bytes = unclaimed_bytes = 0

    def __init__(self, space: Space) -> None:
        self._space: Final = space

    @property
    def capacity_bytes(self) -> int:
        """What is left there."""
        return self._space.used_bytes

    bound_bytes = usable_bytes = capacity_bytes

    def __getattr__(self, name: str) -> int:
        return int(getattr(self._space, name))


class _Sum:
    """A figure of all drives together."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, whole: "WholeSpace", owner: type) -> int:
        return sum(getattr(space, self._name) for space in whole.spaces())


class WholeSpace:
    """The sums of the figures of several drives."""

    capacity_bytes = _Sum()
    bound_bytes = _Sum()
    usable_bytes = _Sum()
    used_bytes = _Sum()
    free_bytes = _Sum()
    unclaimed_bytes = _Sum()
    taken_bytes = _Sum()
    overcommitted_bytes = _Sum()
    recorded_bytes = _Sum()
    removed_bytes = _Sum()
    ready_bytes = _Sum()
    stray_bytes = _Sum()
    pending_delete_bytes = _Sum()
    deleted_open_bytes = _Sum()

    def __init__(self, spaces: Callable[[], Iterable[Space | LeavingSpace]]) -> None:
        """*spaces* returns those of the drives that serve."""
        self.spaces: Final = spaces


#: Space kept free of blocks, for writes in flight and the file system's own growth between checks.
_KEPT_SHARE: Final = 1 / 64
_KEPT_MOST_BYTES: Final = 32 << 20
#: XFS frees unlinked blocks a moment later, so the best of this many checks counts.
_LOOKS: Final = 8


class DeviceRoom:
    """Checks what the device can really hold, which is less than the capacity if others fill it.

    The index, the heat and the file system's own trees grow with the blocks, and others use the
    file system of a directory source, too. So the bound is the capacity, or what the device has if
    that is less.
    """

    def __init__(self, space: Space, free_bytes: Callable[[], int]) -> None:
        """*free_bytes* returns how many bytes can still be allocated (statvfs(2))."""
        self._space = space
        self._free_bytes = free_bytes
        self._looks: deque[int] = deque(maxlen=_LOOKS)
        self._kept_bytes = min(int(space.capacity_bytes * _KEPT_SHARE), _KEPT_MOST_BYTES)

    def measure(self) -> None:
        """Check again; called at every tick. Raises OSError.

        What threads are freeing or allocating may be done already, and then the device counts it.
        So it is not counted a second time here: at worst the device is taken for fuller than it is.
        """
        space = self._space
        held_bytes = space.taken_bytes - space.coming_bytes - space.ordered_bytes
        self._looks.append(held_bytes + self._free_bytes() - self._kept_bytes)
        space.bound_bytes = max(0, min(space.capacity_bytes, max(self._looks)))

    def refused(self) -> None:
        """Note that the device had no space, so earlier checks do not count. Raises OSError."""
        self._looks.clear()
        self.measure()


#: Share of the capacity for leases and kept blocks together; more only if a setting is higher.
_TOGETHER_SHARE: Final = 0.92


class StayBounds:
    """How much of a pool leases, pins and policies may keep from eviction.

    Each has its share of what the pool can hold now, which may be less than its capacity. Together
    they leave some of that to evictable blocks; otherwise stores without a lease or pin would be
    refused. What is kept already stays.
    """

    def __init__(
        self, whole_bytes: Callable[[], int], *, lease_max: float, pin_share: float
    ) -> None:
        """*whole_bytes* returns what the pool can hold."""
        self._whole_bytes = whole_bytes
        self._leases_share = lease_max
        self._kept_share = pin_share
        self._together_share = max(_TOGETHER_SHARE, lease_max, pin_share)

    def leases_end_bytes(self, kept_bytes: int) -> int:
        """Return how many bytes leases may hold beside *kept_bytes*."""
        return self._end_bytes(self._leases_share, kept_bytes)

    def kept_end_bytes(self, leased_bytes: int) -> int:
        """Return how many bytes pins and policies may keep beside *leased_bytes*."""
        return self._end_bytes(self._kept_share, leased_bytes)

    @property
    def kept_most_bytes(self) -> int:
        """How many bytes that are kept already may stay kept, however many leases there are."""
        return int(self._kept_share * self._whole_bytes())

    def _end_bytes(self, share: float, others_bytes: int) -> int:
        whole_bytes = self._whole_bytes()
        both_bytes = int(self._together_share * whole_bytes)
        return max(0, min(int(share * whole_bytes), both_bytes - others_bytes))
