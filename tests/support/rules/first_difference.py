"""Where large bytes differ, in a line each: pytest would compare them item by item, for hours.

``tests/conftest.py`` has every failing ``assert left == right`` of a test told so.
"""

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Final

#: What is shorter may be told in full.
SHORT_BYTES: Final = 200
_AROUND_BYTES: Final = 16
_TOLD: Final = 8
_LOOK_BYTES: Final = 1 << 16


def told_apart(left: object, right: object) -> list[str] | None:
    """Return what *left* and *right* differ in; None where no large bytes are in either."""
    if not (_has_large(left) or _has_large(right)):
        return None
    lines = [f"{_short(left)} == {_short(right)}"]
    told = itertools.islice(_differences("", left, right), _TOLD + 1)
    for number, line in enumerate(told):
        lines.append(line if number < _TOLD else "and more")
    return lines


def first_difference(left: bytes, right: bytes) -> int:
    """Return the offset of the first byte that differs: the shorter's length if none does."""
    common_bytes = min(len(left), len(right))
    for start in range(0, common_bytes, _LOOK_BYTES):
        end = min(start + _LOOK_BYTES, common_bytes)
        if left[start:end] != right[start:end]:
            return next(at for at in range(start, end) if left[at] != right[at])
    return common_bytes


def _has_large(value: object) -> bool:
    if isinstance(value, bytes | bytearray):
        return len(value) > SHORT_BYTES
    if isinstance(value, Mapping):
        return any(map(_has_large, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_large, value))


def _short(value: object) -> str:
    if isinstance(value, bytes | bytearray) and len(value) > SHORT_BYTES:
        digest = hashlib.sha1(value, usedforsecurity=False).hexdigest()[:12]
        return f"<{len(value)} bytes, sha1 {digest}>"
    if isinstance(value, Mapping | list | tuple) and _has_large(value):
        return f"<{type(value).__name__} of {len(value)}>"
    told = repr(value)
    return told if len(told) <= SHORT_BYTES else f"{told[:SHORT_BYTES]}..."


def _differences(where: str, left: object, right: object) -> Iterator[str]:
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in {**left, **right}:
            here = f"{where}[{key!r}]"
            if key not in right:
                yield f"{here}: only left: {_short(left[key])}"
            elif key not in left:
                yield f"{here}: only right: {_short(right[key])}"
            elif left[key] != right[key]:
                yield from _differences(here, left[key], right[key])
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        if len(left) != len(right):
            yield f"{where or 'they'}: {len(left)} items, not {len(right)}"
        for number, (mine, theirs) in enumerate(zip(left, right, strict=False)):
            if mine != theirs:
                yield from _differences(f"{where}[{number}]", mine, theirs)
    else:
        yield f"{where or 'they'}: {_short(left)} != {_short(right)}"
        if isinstance(left, bytes | bytearray) and isinstance(right, bytes | bytearray):
            at = first_difference(bytes(left), bytes(right))
            mine, theirs = (bytes(side[at : at + _AROUND_BYTES]) for side in (left, right))
            yield f"  from byte {at} on: {mine!r}, not {theirs!r}"
