"""How much of a pool is taken: the sum of its drives. Space is taken and given back on a drive."""

from collections.abc import Callable, Iterable
from typing import Final, Protocol

from kvfs.pool.space.space import Space


class SpaceFigures(Protocol):
    """How much is taken, and by what, to be read: of one drive, or of a whole pool (space.py)."""

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

    def __init__(self, spaces: Callable[[], Iterable[Space]]) -> None:
        """*spaces* returns those of the drives that serve."""
        self.spaces: Final = spaces
