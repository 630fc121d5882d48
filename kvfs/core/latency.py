"""How long something took, counted in buckets of powers of two. Pure; time is an argument.

Counting costs one list access and no allocation, because it is done in each store and request.
"""

from typing import Any, Final

from kvfs.core.types import SECOND_NS

#: The first bucket ends at 2**12 ns (4 us), the last but one at 2**36 ns (69 s).
_FIRST_BITS: Final = 12
_BUCKETS: Final = 26
_LAST: Final = _BUCKETS - 1
#: ``recent`` covers the last one to two of these intervals.
RECENT_S: Final = 300.0


class Latency:
    """A histogram of durations, since it was created."""

    __slots__ = ("counts", "total_ns")

    def __init__(self) -> None:
        self.counts = [0] * _BUCKETS
        self.total_ns = 0

    def add(self, duration_ns: int) -> None:
        """Count one duration; a negative one (the clock was set back) is ignored."""
        if duration_ns < 0:
            return
        bucket = (duration_ns >> _FIRST_BITS).bit_length()
        # A call of min() takes as long as all the rest.
        self.counts[bucket if bucket < _LAST else _LAST] += 1  # noqa: FURB136
        self.total_ns += duration_ns

    def shown(self) -> dict[str, Any]:
        """Return count, sum and quantiles in seconds, and the buckets.

        ``buckets`` holds ``[upper end in seconds, count up to there]``; longer ones are in
        ``count`` alone.
        """
        cumulative = 0
        buckets = []
        for number, count in enumerate(self.counts[:_LAST]):
            cumulative += count
            buckets.append([upper_s(number), cumulative])
        return {
            "count": sum(self.counts),
            "total_s": round(self.total_ns / SECOND_NS, 6),
            "p50_s": quantile_s(self.counts, 0.5),
            "p99_s": quantile_s(self.counts, 0.99),
            "buckets": buckets,
        }


class RecentLatency(Latency):
    """A histogram that also covers the last minutes alone."""

    __slots__ = ("_before", "_began_s", "_last")

    def __init__(self) -> None:
        super().__init__()
        self._before = self._last = [0] * _BUCKETS
        self._began_s: float | None = None

    def run_due(self, now_s: float) -> None:
        """Begin the next interval when it is due."""
        if self._began_s is None:
            self._began_s = now_s
        elif now_s - self._began_s >= RECENT_S:
            self._before, self._last, self._began_s = self._last, self.counts.copy(), now_s

    def shown(self) -> dict[str, Any]:
        """Return what Latency returns, and count and p99 (s) of the last 5 to 10 minutes."""
        recent = [now - before for now, before in zip(self.counts, self._before, strict=True)]
        told = super().shown()
        return {**told, "recent": {"count": sum(recent), "p99_s": quantile_s(recent, 0.99)}}


def upper_s(bucket: int) -> float:
    """Return where bucket number *bucket* ends, in seconds."""
    return float((1 << (_FIRST_BITS + bucket)) / SECOND_NS)


def quantile_s(counts: list[int], share: float) -> float | None:
    """Return the duration (s) below which *share* of *counts* lies; None without counts.

    Like Prometheus' histogram_quantile it interpolates within a bucket, except in the last one.
    """
    wanted = share * sum(counts)
    below = 0
    for number, count in enumerate(counts[:_LAST]):
        if count and below + count >= wanted:
            start_s = upper_s(number - 1) if number else 0.0
            return round(start_s + (upper_s(number) - start_s) * (wanted - below) / count, 6)
        below += count
    return upper_s(_LAST - 1) if sum(counts) else None
