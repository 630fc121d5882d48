"""How much of the capacity is taken, and by what.

- ``recorded_bytes``: published blocks, as the index says.
- ``extra_bytes``: what open drafts and removed but open blocks hold beyond that.
- ``ready_bytes``: ready extents.
- ``pending_delete_bytes``: extents without an owner that are not unlinked yet.
- ``deleted_open_bytes``: the same, but somebody still has them open or mapped.
- ``pledged_bytes``: what writes in flight may still allocate.
- ``lacking_bytes``: a guess at what drafts will take beyond their reserve before the next look.
"""

from kvfs.core.errors import NoSpace


class Space:
    """The bound of the pool. All figures are allocated bytes on the device."""

    def __init__(self, capacity_bytes: int, recorded_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        #: The capacity, or what the device can really hold (device_room.py).
        self.bound_bytes = capacity_bytes
        self.recorded_bytes = recorded_bytes
        self.extra_bytes = 0
        self.ready_bytes = 0
        self.pending_delete_bytes = 0
        self.deleted_open_bytes = 0
        self.pledged_bytes = 0
        self.lacking_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of clients' data. Ready extents do not count, because they give way."""
        return self.recorded_bytes + self.extra_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that clients may store now, if ready extents give way."""
        return max(0, self.unclaimed_bytes + self.ready_bytes)

    @property
    def unclaimed_bytes(self) -> int:
        """Bytes that are neither held nor promised; below 0 if more is taken than there is."""
        return self.bound_bytes - self.taken_bytes - self.pledged_bytes - self.lacking_bytes

    @property
    def taken_bytes(self) -> int:
        """Bytes in all extents."""
        gone_bytes = self.pending_delete_bytes + self.deleted_open_bytes
        return self.recorded_bytes + self.extra_bytes + self.ready_bytes + gone_bytes

    @property
    def overstepped_bytes(self) -> int:
        """By how much taken and promised bytes exceed the bound, 0 if they fit."""
        return max(0, self.taken_bytes + self.pledged_bytes - self.bound_bytes)

    @property
    def overcommitted_bytes(self) -> int:
        """By how much all extents together exceed the capacity, 0 if they fit."""
        return max(0, self.taken_bytes - self.capacity_bytes)

    def fits_but_for_guesses(self, size_bytes: int) -> bool:
        """Whether only the guess at what drafts will take is in the way."""
        there_bytes = self.unclaimed_bytes + self.ready_bytes
        return there_bytes < size_bytes <= there_bytes + self.lacking_bytes

    def require(self, size_bytes: int) -> None:
        """Raise NoSpace unless *size_bytes* more data fit."""
        if size_bytes > self.unclaimed_bytes + self.ready_bytes:
            raise NoSpace(f"{size_bytes} bytes do not fit into {self.free_bytes} free ones")
