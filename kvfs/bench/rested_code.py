"""How much longer code takes after a short rest, when others have filled the CPU's caches.

The requests of large loads come milliseconds apart. If nobody else uses the caches, the server's
code is still in them. If other virtual machines or large loads use them, it comes from memory
again, line by line: the same work was seen to take six to ten times the CPU time.
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Final

#: Some 30 us of work for the interpreter, like a request.
_VALUE: Final = {str(number): [number, number / 7] for number in range(8)}
REST_S: Final = 0.005
_IN_A_LOOP: Final = 400
_AFTER_A_REST: Final = 60


def _work() -> None:
    json.loads(json.dumps(_VALUE, sort_keys=True))


def rest_factor(
    work: Callable[[], object] = _work,
    clock_ns: Callable[[], int] = time.thread_time_ns,
    rest: Callable[[float], None] = time.sleep,
) -> float:
    """Return the CPU time of *work* after a rest, divided by that in a loop. Takes 0.5 s."""
    in_a_loop = [_took_ns(work, clock_ns) for _ in range(_IN_A_LOOP)]
    rested = []
    for _ in range(_AFTER_A_REST):
        rest(REST_S)
        rested.append(_took_ns(work, clock_ns))
    return statistics.median(rested) / max(1, statistics.median(in_a_loop))


def _took_ns(work: Callable[[], object], clock_ns: Callable[[], int]) -> int:
    started_ns = clock_ns()
    work()
    return clock_ns() - started_ns
