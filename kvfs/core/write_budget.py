"""A budget of writes: what a drive may be written a day, held by a price. Pure.

The price is what a block must be worth to be written, in hits while the pool keeps it. It rises
while more is written than allowed, and falls while less is. Allowed is the rate of the budget, and
what was left over or overdrawn before, spread over some hours. So over a day the budget is written,
if there is that much worth a write, whatever the load: no trace is needed, and no model of it.

A load of a few kinds of blocks has no price at which just the budget is written: then the price
goes up and down about what one of them is worth.
"""

from collections import deque
from math import exp, isfinite, log
from typing import Final

_HOURLY_S: Final = 3600.0
_DAY_S: Final = 24 * _HOURLY_S
#: The price changes by a factor of e in this time, if twice of what is allowed is written, or
#: nothing: longer than a write takes to reach the drive, which is half a minute at most.
_STEERS_S: Final = 600.0
#: What was left over or overdrawn is made good within about this time: less than a day, and far
#: longer than the price takes, or they chase each other.
_MAKES_GOOD_S: Final = 6 * _HOURLY_S
#: What idle hours leave over, at most, in days: a night's, for the day after it.
_LEFT_MAX_DAYS: Final = 0.5
#: What is overdrawn at most: older debts are forgiven, or nothing would be written for days.
_DEBT_MAX_DAYS: Final = 0.5
#: However much was overdrawn, this share of the budget's rate is allowed, or all would stop.
_ALLOWED_MIN: Final = 1 / 8
#: At this price all is written. A class whose blocks come back at once is worth some hundreds.
_PRICE_MIN: Final = 0.01
_PRICE_MAX: Final = 1000.0
_LOG_MIN: Final = log(_PRICE_MIN)
#: Hours that are remembered.
HOURS: Final = 24


class WriteBudget:
    """The budget of a pool. Call ``count`` every few seconds."""

    def __init__(self, a_day_bytes: int) -> None:
        """*a_day_bytes*: what may be written a day; 0: there is no budget."""
        self.a_day_bytes: Final = a_day_bytes
        self._log_price = _LOG_MIN
        #: What was written above the budget, in days of it; below 0: what is left over.
        self._over_days = 0.0
        self._counted: tuple[float, int] | None = None
        #: When the last hours began (s), and what was written until then.
        self._hours: deque[tuple[float, int]] = deque(maxlen=HOURS + 1)

    @property
    def price(self) -> float:
        """What a block must be worth to be written, in hits; 0: all is."""
        return 0.0 if self._log_price <= _LOG_MIN else exp(self._log_price)

    @property
    def state(self) -> tuple[float, float]:
        """What is to outlive a restart."""
        return self._log_price, self._over_days

    def recall(self, log_price: float, over_days: float) -> None:
        """Go on with a ``state``; what cannot be is ignored."""
        if isfinite(log_price) and isfinite(over_days):
            self._log_price = min(max(log_price, _LOG_MIN), log(_PRICE_MAX))
            self._over_days = min(max(over_days, -_LEFT_MAX_DAYS), _DEBT_MAX_DAYS)

    def count(self, written_bytes: int, now_s: float) -> None:
        """Note that *written_bytes* were written since the start, by *now_s* (monotonic)."""
        if not self.a_day_bytes:
            return
        before_s, before_bytes = self._counted or (now_s, written_bytes)
        self._counted = now_s, written_bytes
        if not self._hours or now_s - self._hours[-1][0] >= _HOURLY_S:
            self._hours.append(self._counted)
        passed_s = now_s - before_s
        # In seconds of the budget's rate.
        written_s = max(0, written_bytes - before_bytes) * _DAY_S / self.a_day_bytes
        over_days = self._over_days + (written_s - passed_s) / _DAY_S
        self._over_days = min(max(over_days, -_LEFT_MAX_DAYS), _DEBT_MAX_DAYS)
        allowed = max(_ALLOWED_MIN, 1 - self._over_days * _DAY_S / _MAKES_GOOD_S)
        log_price = self._log_price + (written_s / allowed - passed_s) / _STEERS_S
        self._log_price = min(max(log_price, _LOG_MIN), log(_PRICE_MAX))

    def used_share(self, hours: int) -> float | None:
        """Return how much of the budget's rate was written in the last *hours*, or since the start.

        1: just the budget. None: there is none, or nothing was counted yet.
        """
        if self._counted is None:
            return None
        now_s, now_bytes = self._counted
        begun_s, begun_bytes = self._hours[max(0, len(self._hours) - 1 - hours)]
        if now_s <= begun_s:
            return None
        return (now_bytes - begun_bytes) * _DAY_S / (now_s - begun_s) / self.a_day_bytes
