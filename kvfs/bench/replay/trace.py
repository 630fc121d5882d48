"""Request traces: which blocks each prompt asked for, and when.

Two formats, one line per request, also compressed with gzip (docs/performance.md):

- Mooncake's JSON lines: ``timestamp`` (ms), ``input_length`` (tokens), ``hash_ids`` (blocks, head
  first); other keys are ignored. The traces of FAST'25 have blocks of 512 tokens.
- Plain words: ``MILLISECONDS TOKENS BLOCK BLOCK ...``. A block is a number below 2^64 or any other
  word, say a hash; ``7+3`` stands for the blocks 7, 8 and 9. Lines that begin with ``#`` and empty
  lines count for nothing.
"""

import gzip
import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO, Final, NamedTuple

from kvfs.core.errors import TraceUnreadable

_GZIP_MAGIC: Final = b"\x1f\x8b"
#: Block numbers are below it: a block's content follows from 64 bits (kv_shapes.py).
_BLOCKS_END: Final = 1 << 64
#: More blocks in one prompt are a mistake in the file: at 16 tokens a block, 16 million tokens.
_BLOCKS_MAX: Final = 1 << 20
#: The key of the first line of a recording (bench/simulate/recording.py), which is no trace.
RECORDING_KEY: Final = "kvfs_recording"
#: Its value. Goes up when a key of a recording changes its meaning or is removed.
RECORDING_FORMAT: Final = 1
_KEYS: Final = ("timestamp", "input_length", "hash_ids")


class Request(NamedTuple):
    """One prompt: when it came (s), its length in tokens, and its blocks, head first."""

    at_s: float
    tokens: int
    blocks: tuple[int, ...]


def footprint(requests: Iterable[Request]) -> int:
    """Return how many different blocks *requests* ask for."""
    return len({block for request in requests for block in request.blocks})


def read_trace(path: str, requests_max: int | None = None) -> list[Request]:
    """Return the requests of the trace in file *path*, or the first *requests_max* of them.

    Raises ``TraceUnreadable``, with the number of the line that is at fault.
    """
    requests: list[Request] = []
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(lines_of(file), 1):
                if requests_max is not None and len(requests) == requests_max:
                    break
                try:
                    request = parse_line(line.decode())
                except ValueError as error:
                    raise TraceUnreadable(f"{path}, line {number}: {error}") from None
                if request is None:
                    continue
                if requests and request.at_s < requests[-1].at_s:
                    raise TraceUnreadable(
                        f"{path}, line {number}: earlier than the request before; sort the trace "
                        "by time"
                    )
                requests.append(request)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceUnreadable(f"{path}: damaged gzip data: {error}") from None
    except OSError as error:
        raise TraceUnreadable(f"{path}: {error.strerror}") from None
    if not footprint(requests):
        raise TraceUnreadable(f"{path}: no request in it asks for a block")
    return requests


def parse_line(line: str) -> Request | None:
    """Return the request of *line*, None for a comment or an empty line; raises ``ValueError``."""
    line = line.strip()
    if not line or line.startswith("#"):
        return None
    at_ms, tokens, blocks = _json_parts(line) if line.startswith("{") else _word_parts(line)
    if not 0 <= at_ms < math.inf:  # False for NaN, too
        raise ValueError("the time must be milliseconds, 0 or more")
    if tokens < 0:
        raise ValueError("the number of tokens must be 0 or more")
    if len(blocks) > _BLOCKS_MAX:
        raise ValueError(f"more than {_BLOCKS_MAX} blocks in one request")
    if not all(0 <= block < _BLOCKS_END for block in blocks):
        raise ValueError("a block's number must be 0 or more, and below 2^64")
    return Request(at_ms / 1000, tokens, tuple(blocks))


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of *file*, which may be compressed with gzip. Raises what gzip does."""
    magic = file.read(len(_GZIP_MAGIC))
    file.seek(0)
    if magic == _GZIP_MAGIC:
        with gzip.open(file) as lines:
            yield from lines
    else:
        yield from file


def _json_parts(line: str) -> tuple[float, int, Sequence[int]]:
    try:
        found: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    if RECORDING_KEY in found:
        raise ValueError("a recording by `kvfs record`, without prompts: `kvfs simulate` reads it")
    if missing := [key for key in _KEYS if key not in found]:
        raise ValueError(f"no {', '.join(missing)}")
    at_ms, tokens, blocks = (found[key] for key in _KEYS)
    if not _is_number(at_ms) or not isinstance(tokens, int) or isinstance(tokens, bool):
        raise ValueError("timestamp and input_length must be numbers")
    if not isinstance(blocks, list):
        raise ValueError("hash_ids must be a list")
    return float(at_ms), tokens, [_block(each) for each in blocks]


def _word_parts(line: str) -> tuple[float, int, Sequence[int]]:
    words = line.split()
    try:
        at_ms, tokens = float(words[0]), int(words[1])
    except (IndexError, ValueError):
        raise ValueError(
            "not a request: neither MILLISECONDS TOKENS BLOCK ... nor one of Mooncake's in JSON"
        ) from None
    blocks: list[int] = []
    for word in words[2:]:
        first, plus, count = word.partition("+")
        if plus and first.isdecimal() and count.isdecimal():
            if int(count) > _BLOCKS_MAX:
                raise ValueError(f"more than {_BLOCKS_MAX} blocks in one request")
            blocks += range(int(first), int(first) + int(count))
        else:
            blocks.append(_block(word))
    return at_ms, tokens, blocks


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _block(name: object) -> int:
    """Return the number of the block *name*: itself, or 64 bits of its hash."""
    if isinstance(name, int) and not isinstance(name, bool):
        return name
    if not isinstance(name, str):
        raise ValueError("a block must be a number or a text")
    if name.isdecimal() and len(name) <= 20:
        return int(name)
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
