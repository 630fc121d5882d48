"""How much of the pool leases, pins and policies may keep from eviction. Pure.

Each has its share, and together they leave some of the pool to evictable blocks; otherwise stores
without leases and pins would be refused. What came first stays.
"""

from typing import Final

#: Share of the capacity for both together; more only if a setting is higher.
_TOGETHER_SHARE: Final = 0.92


class StayBounds:
    """The limits of a pool of *capacity_bytes*, from its settings."""

    def __init__(self, capacity_bytes: int, *, lease_max: float, pin_share: float) -> None:
        self._leases_bytes = int(lease_max * capacity_bytes)
        self._kept_bytes = int(pin_share * capacity_bytes)
        self._together_bytes = int(max(_TOGETHER_SHARE, lease_max, pin_share) * capacity_bytes)

    def leases_end_bytes(self, kept_bytes: int) -> int:
        """Return how much leases may hold beside *kept_bytes*."""
        return max(0, min(self._leases_bytes, self._together_bytes - kept_bytes))

    def kept_end_bytes(self, leased_bytes: int) -> int:
        """Return how much may be kept beside *leased_bytes* when more comes."""
        return max(0, min(self._kept_bytes, self._together_bytes - leased_bytes))

    @property
    def kept_most_bytes(self) -> int:
        """How much of what was kept before may stay kept, however many leases there are."""
        return self._kept_bytes
