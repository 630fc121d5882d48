"""Recordings of a mount's load (`kvfs record`), as requests that ask for one block each.

A recording tells which blocks were used, and not in which prompts. So each use stands alone: no
block needs another one before it to be of use. docs/simulate.md has the format.
"""

import json
import zlib
from collections.abc import Iterable
from gzip import BadGzipFile
from typing import Any, Final, NamedTuple

from kvfs.bench.replay.trace import RECORDING_KEY, Request, lines_of
from kvfs.core.errors import TraceUnreadable

#: The value of RECORDING_KEY in the first line. Goes up when a key of a line changes its meaning or
#: is removed.
FORMAT: Final = 1
_NUMBERS_END: Final = 1 << 32
#: Times are seconds since 1970; a later one is a mistake.
_TIMES_END_S: Final = 1 << 40
#: What is summed up over the lines.
_COUNTS: Final = ("bytes", "hits", "misses", "lost", "gap_s")


class Recording(NamedTuple):
    """What was recorded."""

    requests: list[Request]
    """Each of one block; the time begins at the header's."""
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
    if header[RECORDING_KEY] != FORMAT:
        raise TraceUnreadable(
            f"{path}: a recording of format {header[RECORDING_KEY]!r}; this kvfs reads {FORMAT}"
        )
    counts, uses, number = dict.fromkeys(_COUNTS, 0.0), 0, 1
    requests, at_s = list[Request](), 0.0
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
            uses += len(blocks)
            requests += (Request(at_s, 0, (block,)) for block in blocks)
            for name in counts:
                counts[name] += _number(line, name)
            if uses_max is not None and uses >= uses_max:
                break
    except ValueError as error:
        raise TraceUnreadable(f"{path}, line {number}: {error}") from None
    if not requests:
        raise TraceUnreadable(f"{path}: no block was used while it was recorded")
    block_bytes = max(1, round(counts.pop("bytes") / uses))
    hits, misses, lost, gaps_s = counts.values()
    room = int(room_bytes) // block_bytes
    return Recording(
        requests[:uses_max], block_bytes, room, int(hits), int(misses), int(lost), gaps_s
    )


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
