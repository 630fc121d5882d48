"""What is simulated beside traces: recordings of a mount, and workloads made by rule.

A recording (`kvfs record`) is requests that ask for one block each.

A recording tells which blocks were used, and not in which prompts. So each use stands alone: no
block needs another one before it to be of use. docs/simulate.md has the format.

Of a long recording a sample of the blocks is served, from pools that are smaller by as much
(SHARDS: Waldspurger et al., FAST 2015).

Workloads made by rule are hard for a cache, and none is like the recorded trace. The same name
makes the same requests.
"""

import json
import random
import zlib
from collections.abc import Callable, Iterable, Sequence
from gzip import BadGzipFile
from itertools import accumulate
from typing import Any, Final, NamedTuple

from kvfs.bench.replay.trace import RECORDING_FORMAT, RECORDING_KEY, Request, footprint, lines_of
from kvfs.bench.simulate.served import Outcome
from kvfs.core.admission import Hint
from kvfs.core.errors import TraceUnreadable

_NUMBERS_END: Final = 1 << 32
#: 2^32 by the golden ratio: it spreads numbers that are not by chance (Knuth, TAOCP 3, 6.4).
_GOLDEN: Final = 0x9E3779B9
#: Times are seconds since 1970; a later one is a mistake.
_TIMES_END_S: Final = 1 << 40
#: Uses that are served, by a pool and policy in seconds to a minute; of more a sample is.
SERVED_MAX: Final = 1 << 16
#: Blocks that a sample has at least: a percent of them is more than chance.
SAMPLED_LEAST: Final = 1 << 12
#: What is summed up over the lines.
_COUNTS: Final = ("bytes", "hits", "misses", "lost", "gap_s")


class Recording(NamedTuple):
    """What was recorded."""

    requests: list[Request]
    """Each of one block, of the sample; the time begins at the header's."""
    uses: int
    """How many there are in all."""
    one_in: int
    """The sample has one block in so many."""
    block_bytes: int
    """The mean size of the blocks that are asked for."""
    room: int
    """How many blocks of that size the mount had room for."""
    hits: int
    misses: int
    """What the mount counted meanwhile (`kvfs status`)."""
    lost: int
    """Uses that are not in it."""
    gaps_s: float
    """How long nothing was recorded, because the server was replaced."""

    def of_all(self, found: Outcome) -> Outcome:
        """Return what *found*, of the sample, is of all uses.

        A few blocks have many of the uses, and are hits wherever they are served. So uses that the
        sample has too few or too many of count as hits (SHARDS-adj of the same paper).
        """
        share = len(self.requests) * self.one_in / self.uses
        return Outcome(
            max(0.0, 100 - (100 - found.prefix_hits) * share),
            found.written * share,
            {age: gain * share for age, gain in found.behind.items()},
            found.evicted * share,
        )


def recording_at(path: str, uses_max: int | None = None) -> Recording | None:
    """Return the recording in file *path*, or its first *uses_max* uses; None if it is none.

    A last line that is not whole, as a kill leaves it, counts for nothing. Raises
    ``TraceUnreadable`` with the number of the line that is at fault.
    """
    try:
        with open(path, "rb") as file:
            lines = lines_of(file)
            header = _table(next(lines, b""))
            if header is None or RECORDING_KEY not in header:
                return None
            return _recording(path, header, lines, uses_max)
    except (OSError, EOFError, zlib.error, BadGzipFile):
        return None  # who reads it as a trace says why


def _recording(
    path: str, header: dict[str, Any], lines: Iterable[bytes], uses_max: int | None
) -> Recording:
    if header[RECORDING_KEY] != RECORDING_FORMAT:
        found = f"a recording of format {header[RECORDING_KEY]!r}"
        raise TraceUnreadable(f"{path}: {found}; this kvfs reads {RECORDING_FORMAT}")
    counts, sample, told, number = dict.fromkeys(_COUNTS, 0.0), _Sample(), 0, 1
    at_s = 0.0
    try:
        room_bytes, begun_s = _number(header, "for_blocks_bytes"), _number(header, "time")
        for text in lines:
            number += 1
            line = _table(text)
            if line is None:
                if not text.endswith(b"\n"):
                    break
                raise ValueError("not a line of JSON")
            blocks, at_s = _blocks(line), max(at_s, _number(line, "time") - begun_s)
            told += len(blocks)
            sample.add(at_s, blocks if uses_max is None else blocks[: uses_max - sample.uses])
            for name in counts:
                counts[name] += _number(line, name)
            if uses_max is not None and sample.uses >= uses_max:
                break
    except ValueError as error:
        raise TraceUnreadable(f"{path}, line {number}: {error}") from None
    if not told:
        raise TraceUnreadable(f"{path}: no block was used while it was recorded")
    block_bytes = max(1, round(counts.pop("bytes") / told))
    hits, misses, lost, gaps_s = counts.values()
    return Recording(
        *(sample.requests, sample.uses, sample.one_in, block_bytes, int(room_bytes) // block_bytes),
        *(int(hits), int(misses), int(lost), gaps_s),
    )


class _Sample:
    """The uses that are served: all, or once these are too many, those of some blocks."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.uses = 0
        self.one_in = 1
        self._most = SERVED_MAX

    def add(self, at_s: float, blocks: list[int]) -> None:
        """Add uses of *blocks*."""
        self.uses += len(blocks)
        self.requests += (Request(at_s, 0, (block,)) for block in blocks if self._has(block))
        while len(self.requests) > self._most:
            if footprint(self.requests) < 2 * SAMPLED_LEAST:
                self._most *= 2  # few blocks are a small pool, which serves fast
                continue
            self.one_in *= 2
            self.requests = [each for each in self.requests if self._has(each.blocks[0])]

    def _has(self, block: int) -> bool:
        return block * _GOLDEN % _NUMBERS_END * self.one_in < _NUMBERS_END


def _table(line: bytes) -> dict[str, Any] | None:
    """Return the JSON table of *line*, None if it is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _number(line: dict[str, Any], name: str) -> float:
    """Return the number *name*, 0 if it is not there. Raises ValueError."""
    value = line.get(name, 0)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{name} is no number")
    if not 0 <= value < (_TIMES_END_S if name == "time" else float("inf")):
        raise ValueError(f"{name} is out of range")
    return value


def _blocks(line: dict[str, Any]) -> list[int]:
    """Return the numbers of the blocks that were used. Raises ValueError."""
    blocks = line.get("blocks")
    if not isinstance(blocks, list):
        raise ValueError("blocks is no list")
    for block in blocks:
        if not isinstance(block, int) or isinstance(block, bool) or not 0 <= block < _NUMBERS_END:
            raise ValueError(f"{block!r} is no number of a block")
    return blocks


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
