"""Workloads that are hard for a cache, made by rule: none is like the recorded trace.

Each is a list of requests as a trace has them. The same name makes the same requests.
"""

import random
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

from kvfs.bench.replay.trace import Request
from kvfs.core.admission import Hint

_SEED: Final = 37
#: Blocks of a prompt, and tokens of a block.
_PROMPT: Final = 20
_TOKENS: Final = 512
#: Seconds between two prompts.
_EVERY_S: Final = 0.3
_REQUESTS: Final = 3000
#: Prompts that are asked for again and again, by Zipf's law: the n-th most often 1/n as often.
_POPULAR: Final = 300


def scan() -> list[Request]:
    """Return popular prompts; every other one is of a scan, which nobody asks for again."""
    draw, weights = random.Random(_SEED), _zipf()
    numbers = []
    for number in range(_REQUESTS):
        popular = draw.choices(range(_POPULAR), cum_weights=weights)[0]
        numbers.append(popular if number % 2 else _POPULAR + number)
    return _prompts(numbers)


def loop() -> list[Request]:
    """Return the same prompts over and over, in the same order."""
    return _prompts([number % _POPULAR for number in range(_REQUESTS)])


def drift() -> list[Request]:
    """Return popular prompts, of which the most popular one gives way every twenty requests."""
    draw, weights = random.Random(_SEED), _zipf()
    chosen = (draw.choices(range(_POPULAR), cum_weights=weights)[0] for _ in range(_REQUESTS))
    return _prompts([one + number // 20 for number, one in enumerate(chosen)])


#: All, by the name that the command line takes.
SYNTHETIC: Final[dict[str, Callable[[], list[Request]]]] = {
    "scan": scan,
    "loop": loop,
    "drift": drift,
}


def shuffled(requests: Sequence[Request]) -> list[Request]:
    """Return the same requests in an order by chance; the times stay where they were."""
    order = list(requests)
    random.Random(_SEED).shuffle(order)
    return [one._replace(at_s=was.at_s) for one, was in zip(order, requests, strict=True)]


def hints_of(requests: Sequence[Request], right: float) -> list[Hint]:
    """Return a hint for each request, of which the share *right* is true.

    A session goes on if a later request asks for the last whole block of this one.
    """
    draw = random.Random(_SEED)
    later: set[int] = set()
    hints = []
    for request in reversed(requests):
        whole = request.blocks[-2:][:1]
        true = Hint.GOES_ON if later.issuperset(whole) else Hint.ONCE
        false = Hint.ONCE if true is Hint.GOES_ON else Hint.GOES_ON
        hints.append(true if draw.random() < right else false)
        later.update(request.blocks)
    return hints[::-1]


def _zipf() -> list[float]:
    return list(accumulate(1 / (rank + 1) for rank in range(_POPULAR)))


def _prompts(numbers: Sequence[int]) -> list[Request]:
    """Return a prompt of its own blocks for each of *numbers*, equal ones for equal numbers."""
    return [
        Request(
            at * _EVERY_S,
            _PROMPT * _TOKENS,
            tuple(range(number * _PROMPT, (number + 1) * _PROMPT)),
        )
        for at, number in enumerate(numbers)
    ]
