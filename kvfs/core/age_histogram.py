"""A histogram of ages in seconds. Its quantiles are right to within a tenth."""

import math
from itertools import accumulate
from typing import Final

#: Buckets per doubling of the age. All ages below _YOUNGEST_S share the first bucket.
_STEPS: Final = 4
_YOUNGEST_S: Final = 2**-6
#: Enough for ages up to some 500 years.
_BUCKETS: Final = _STEPS * 40
#: After this many ages all counts are halved, so that the quantiles follow the current load.
_HALVED_AFTER: Final = 1 << 16
#: The median, and the range in which 80 % of the ages lie.
_QUANTILES: Final = (("p10_s", 0.1), ("p50_s", 0.5), ("p90_s", 0.9))


class AgeHistogram:
    """Counts of ages in seconds."""

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self._total = 0

    def add(self, age_s: float) -> None:
        """Count one age. A negative one (the clock was set back) counts as 0."""
        bucket = int(_STEPS * math.log2(max(age_s, _YOUNGEST_S) / _YOUNGEST_S))
        self._counts[min(bucket, _BUCKETS - 1)] += 1
        self._total += 1
        if self._total >= _HALVED_AFTER:
            self._counts = [count // 2 for count in self._counts]
            self._total = sum(self._counts)

    def quantile_s(self, share: float) -> float | None:
        """Return the age (s) that *share* of all ages do not exceed; None without ages."""
        if not self._total:
            return None
        wanted = max(1, math.ceil(share * self._total))
        bucket = next(at for at, sum_ in enumerate(accumulate(self._counts)) if sum_ >= wanted)
        # The middle of the bucket, in doublings.
        return _YOUNGEST_S * 2 ** ((bucket + 0.5) / _STEPS)

    def quantiles_s(self) -> dict[str, float | None]:
        """Return the quantiles (s) that `kvfs status` shows, under the names it uses."""
        found = {name: self.quantile_s(share) for name, share in _QUANTILES}
        return {name: None if age_s is None else round(age_s, 3) for name, age_s in found.items()}
