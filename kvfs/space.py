"""How much of the capacity is taken, and by what.

``recorded_bytes`` is what the index says published blocks hold; ``extra_bytes`` is what open
drafts and removed-but-open blocks hold beyond that; ``ready_bytes`` lies in prepared extents.
"""

from kvfs.errors import NoSpace


class Space:
    """The bound of the pool. All figures are allocated bytes on the device."""

    def __init__(self, capacity_bytes: int, recorded_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.recorded_bytes = recorded_bytes
        self.extra_bytes = 0
        self.ready_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes that clients' data holds; ready extents are not counted, they give way."""
        return self.recorded_bytes + self.extra_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that clients may still store."""
        return max(0, self.capacity_bytes - self.used_bytes)

    @property
    def overcommitted_bytes(self) -> int:
        """By how much ready extents and data together exceed the capacity, 0 if they fit."""
        return max(0, self.used_bytes + self.ready_bytes - self.capacity_bytes)

    def require(self, size_bytes: int) -> None:
        """Raise NoSpace unless *size_bytes* more data fit."""
        if size_bytes > self.capacity_bytes - self.recorded_bytes - self.extra_bytes:
            raise NoSpace(f"{size_bytes} bytes do not fit into {self.free_bytes} free ones")
