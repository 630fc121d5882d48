"""A day of the cache's counters, for `kvfs report`: a sample every few minutes, in memory.

Bounded by the number of samples, and begun anew by each server, as the counters are.
"""

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import trio

from mount.control.socket import Verb

_log: Final = logging.getLogger(__name__)

#: Of five minutes each they are a day, and some 80 KiB in an answer.
SAMPLES_MAX: Final = 289
#: What a sample takes of `cache` in the status, beside the time and what blocks hold.
_COUNTERS: Final = ("hits", "misses", "loaded_bytes", "stored_bytes")


class History:
    """The samples of one mount; none if the step is 0."""

    def __init__(self, step_s: float, status: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        """*status* returns what `kvfs status` shows, of which a sample has some counters."""
        self._step_s = step_s
        self._status = status
        self._samples: deque[dict[str, float]] = deque(maxlen=SAMPLES_MAX)

    def table(self) -> dict[str, Verb]:
        """Return the verbs by name."""
        return {"history": self._told}

    async def keep(self) -> None:
        """Take a sample now and after each step, until cancelled."""
        while self._step_s:
            try:
                self._take(await self._status())
            except Exception:
                # The last handler: a bug here must not end the mount.
                _log.exception("no sample for the history")
            await trio.sleep(self._step_s)

    def _take(self, status: Mapping[str, Any]) -> None:
        cache = status.get("cache")
        if cache is None:  # the device is lost
            return
        sample: dict[str, float] = {name: cache[name] for name in _COUNTERS}
        sample["evicted_bytes"] = sum(each["bytes"] for each in cache["evicted"].values())
        sample["used_bytes"] = status["used_bytes"]
        self._samples.append({"time_s": round(time.time(), 1), **sample})

    async def _told(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"step_s": self._step_s, "samples": list(self._samples)}
