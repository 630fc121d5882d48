"""Names that were asked for lately, and how often: a table in bytes, 20 of them a block. Pure.

A name may be in any slot of its bucket. The slots of a bucket are in the order of their last use,
so that the one not used for longest falls off its end.
"""

from typing import Final

from kvfs.core.reuse import HASH_BITS

#: Names that are remembered for each block of the pool: so many blocks back a return is still seen.
NAMES_A_BLOCK: Final = 10
_BUCKET: Final = 8
#: How often a name was asked for; more often counts as so often.
TIMES_MAX: Final = 4
_TIMES_MASK: Final = TIMES_MAX - 1
_TIMES_BITS: Final = 2


class KnownNames:
    """The names that a pool of *blocks* blocks was asked for.

    A slot has 14 bits of a name's hash, beside the bucket, so that one in 2,000 unknown names is
    taken for a known one.
    """

    def __init__(self, blocks: int) -> None:
        self._buckets = max(1, NAMES_A_BLOCK * blocks // _BUCKET)
        #: Eight bits of the hash, never 0, which is an empty slot; six more bits with the times.
        self._tags = bytearray(_BUCKET * self._buckets)
        self._more = bytearray(_BUCKET * self._buckets)

    @property
    def size_bytes(self) -> int:
        """The memory that the table takes."""
        return len(self._tags) + len(self._more)

    def times(self, name_hash: int) -> int:
        """Return how often the name with this 32-bit hash was asked for, up to TIMES_MAX; 0: not.

        It is so within the last uses of names, NAMES_A_BLOCK for each block of the pool.
        """
        at = self._find(name_hash, (name_hash * self._buckets >> HASH_BITS) * _BUCKET)
        return 0 if at < 0 else (self._more[at] & _TIMES_MASK) + 1

    def remember(self, name_hash: int, times: int) -> None:
        """Remember that the name was asked for *times* times, the last time now."""
        tags, more = self._tags, self._more
        first = (name_hash * self._buckets >> HASH_BITS) * _BUCKET
        at = self._find(name_hash, first)
        if at < 0 and (at := tags.find(0, first, first + _BUCKET)) < 0:
            at = first + _BUCKET - 1
        if at > first:
            tags[first + 1 : at + 1] = tags[first:at]
            more[first + 1 : at + 1] = more[first:at]
        tags[first] = (name_hash & 0xFF) or 1
        more[first] = name_hash >> 8 << _TIMES_BITS & 0xFC | min(times, TIMES_MAX) - 1

    def _find(self, name_hash: int, first: int) -> int:
        tag, end = (name_hash & 0xFF) or 1, first + _BUCKET
        more = name_hash >> 8 << _TIMES_BITS & 0xFC
        at = self._tags.find(tag, first, end)
        while at >= 0 and self._more[at] & 0xFC != more:
            at = self._tags.find(tag, at + 1, end)
        return at
