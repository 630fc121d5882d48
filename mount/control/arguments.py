"""The arguments of a control request, checked: any program of root may send anything."""

import math
from typing import Any, Final

from kvfs.core.errors import UsageError
from kvfs.engine.names.named import Named

#: Larger sizes and times make no sense; times in ns must fit into 64 bits.
_NUMBER_MAX: Final = 1 << 62


def named_by(args: dict[str, Any]) -> Named:
    """Return what ``paths`` and ``match`` name. Raises UsageError."""
    return Named(tuple(texts(args, "paths")), text(args, "match"))


def texts(args: dict[str, Any], name: str) -> list[str]:
    """Return a list of strings, empty if it is not given. Raises UsageError."""
    value = args.get(name, [])
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise UsageError(f"{name}: must be a list of strings")
    return value


def text(args: dict[str, Any], name: str) -> str | None:
    """Return a string, None if it is not given. Raises UsageError."""
    value = args.get(name)
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{name}: must be a string")
    return value


def number(args: dict[str, Any], name: str, kind: type[int] | type[float]) -> Any:  # noqa: ANN401
    """Return a number, None if it is not given. Raises UsageError."""
    value = args.get(name)
    if value is not None and (not isinstance(value, (int, kind)) or isinstance(value, bool)):
        raise UsageError(f"{name}: must be a number")
    if value is not None and not (math.isfinite(value) and abs(value) <= _NUMBER_MAX):
        raise UsageError(f"{name}: {value} is out of range")
    return value
