"""How much of the capacity is taken, and by what.

``recorded_bytes`` is what the index says published blocks hold; ``extra_bytes`` is what open
drafts and removed-but-open blocks hold beyond that; ``ready_bytes`` lies in prepared extents;
``leaving_bytes`` belongs to nobody any more and is not unlinked yet, ``lingering_bytes`` neither,
but readers have it open or mapped still; ``pledged_bytes`` is what
writes in flight may still allocate; ``lacking_bytes`` what drafts beyond their reserve will take,
or one of those that have one may, until somebody looks at them again.
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
        self.leaving_bytes = 0
        self.lingering_bytes = 0
        self.pledged_bytes = 0
        self.lacking_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes that clients' data holds; ready extents are not counted, they give way."""
        return self.recorded_bytes + self.extra_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that clients may store now, if ready extents give way."""
        return max(0, self.unclaimed_bytes + self.ready_bytes)

    @property
    def unclaimed_bytes(self) -> int:
        """Bytes that nobody holds nor was promised; below 0 if more is taken than there is."""
        return self.bound_bytes - self.taken_bytes - self.pledged_bytes - self.lacking_bytes

    @property
    def taken_bytes(self) -> int:
        """Bytes in extents, whoever they are for."""
        gone_bytes = self.leaving_bytes + self.lingering_bytes
        return self.recorded_bytes + self.extra_bytes + self.ready_bytes + gone_bytes

    @property
    def overstepped_bytes(self) -> int:
        """By how much what is taken and promised exceeds the bound, 0 if it fits."""
        return max(0, self.taken_bytes + self.pledged_bytes - self.bound_bytes)

    @property
    def overcommitted_bytes(self) -> int:
        """By how much all extents together exceed the capacity, 0 if they fit."""
        return max(0, self.taken_bytes - self.capacity_bytes)

    def fits_but_for_guesses(self, size_bytes: int) -> bool:
        """Whether only what drafts may take until they are looked at again is in the way."""
        there_bytes = self.unclaimed_bytes + self.ready_bytes
        return there_bytes < size_bytes <= there_bytes + self.lacking_bytes

    def require(self, size_bytes: int) -> None:
        """Raise NoSpace unless *size_bytes* more data fit."""
        if size_bytes > self.unclaimed_bytes + self.ready_bytes:
            raise NoSpace(f"{size_bytes} bytes do not fit into {self.free_bytes} free ones")
