"""What one setting is: its default, why that default, and which values it takes.

Pure: turns a TOML value or the text of a flag into the value of a ``Settings`` field, or says in
one line why it cannot.
"""

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, field
from typing import Any, Final, TypeVar

from kvfs.core.errors import UsageError
from kvfs.core.sizes import format_size, parse_size

_TRUE: Final = frozenset({"true", "yes", "on", "1"})
_FALSE: Final = frozenset({"false", "no", "off", "0"})
_Value = TypeVar("_Value")
Table = Mapping[str, Mapping[str, str]]


def setting(
    default: _Value,
    reason: str,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    parse: Callable[[str], object] | None = None,
) -> _Value:
    """Declare a field of ``Settings``; *reason* says why *default* is the default.

    *unit* is ``bytes``, ``s``, ``us``, ``share``, ``octal`` or empty; *low* and *high* are
    inclusive. *parse* raises ValueError for a text that makes no sense.
    """
    metadata = {**_metadata(reason, unit, low, high, choices), "parse": parse}
    return field(default=default, metadata=metadata)


def share(default: float, reason: str) -> float:
    """Declare a field of ``Settings`` that is a share, from 0 to 1."""
    return setting(default, reason, unit="share", low=0, high=1)


def setting_table(reason: str, parse: Callable[[object], Table]) -> Table:
    """Declare a field of ``Settings`` that is a table in the file, empty by default."""
    return field(default_factory=dict, metadata={**_metadata(reason), "parse": parse})


def _metadata(
    reason: str,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
) -> dict[str, Any]:
    return {"reason": reason, "unit": unit, "low": low, "high": high, "choices": choices}


def convert(declared: Field[Any], value: object) -> object:
    """Return *value* converted to the field's type; raises ValueError with a one-line reason."""
    kind = declared.type.__name__ if isinstance(declared.type, type) else str(declared.type)
    if kind == "bool":
        return _as_bool(value)
    if "Mapping" in kind:
        return declared.metadata["parse"](value)
    if kind.startswith("str"):
        return _as_text(declared, value)
    number = _as_number(declared.metadata["unit"], kind, value)
    _check_range(declared.metadata, number)
    return number


def show(declared: Field[Any], value: object) -> str:
    """Return *value* as the table of settings prints it."""
    if value is None or value == "" or value == {}:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    unit = declared.metadata["unit"]
    if unit == "bytes" and isinstance(value, int):
        return format_size(value)
    if unit == "octal" and isinstance(value, int):
        return f"{value:04o}"
    return f"{value} {unit}" if unit in ("s", "us") else str(value)


def default_of(declared: Field[Any]) -> object:
    """Return the field's default; every setting has one."""
    if declared.default_factory is not MISSING:
        return declared.default_factory()
    assert declared.default is not MISSING, declared.name
    return declared.default


def refuse_control_characters(text: str) -> None:
    """Raise ValueError when *text*, a path or a name, holds one: logs and scripts read lines."""
    if any(ord(character) < 32 for character in text):
        raise ValueError(f"{text!r} contains a control character")


def _as_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ValueError(f"{value!r} is not true or false")


def _as_text(declared: Field[Any], value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a string")
    choices: tuple[str, ...] = declared.metadata["choices"]
    if choices and value not in choices:
        raise ValueError(f"{value!r} is not one of {', '.join(choices)}")
    refuse_control_characters(value)
    if (parse := declared.metadata["parse"]) is not None:
        parse(value)
    return value


def _as_number(unit: str, kind: str, value: object) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not a number")
    if isinstance(value, str):
        value = _parse_number(unit, kind, value)
    if kind.startswith("int"):
        if isinstance(value, float) and not value.is_integer():
            raise ValueError(f"{value!r} is not a whole number")
        return int(value)
    try:
        return float(value)
    except OverflowError:
        raise ValueError("is too large") from None


def _parse_number(unit: str, kind: str, text: str) -> int | float:
    if unit == "bytes":
        return parse_size(text)
    try:
        if unit == "octal":
            return int(text.removeprefix("0o"), 8)
        return int(text) if kind.startswith("int") else float(text)
    except ValueError:
        expected = "an octal mode such as 0755" if unit == "octal" else "a number"
        raise ValueError(f"{text!r} is not {expected}") from None


def _check_range(metadata: Mapping[str, Any], number: float) -> None:
    low, high = metadata["low"], metadata["high"]
    if (low is None or number >= low) and (high is None or number <= high):
        return
    written = oct(int(number)) if metadata["unit"] == "octal" else str(number)
    if high is None:
        raise ValueError(f"{written} is below {_bound(metadata, low)}")
    raise ValueError(f"{written} is outside {_bound(metadata, low)} .. {_bound(metadata, high)}")


def _bound(metadata: Mapping[str, Any], bound: float) -> str:
    if metadata["unit"] == "bytes":
        return format_size(int(bound))
    return oct(int(bound)) if metadata["unit"] == "octal" else str(bound)


#: A mode without 0o: TOML reads 755 as decimal, which is 01363: writable by everyone.
_DECIMAL_MODE: Final = re.compile(r"^[ \t]*[\"']?mode[\"']?[ \t]*=[ \t]*\+?[1-9]", re.MULTILINE)


def table_of(text: str, origin: str) -> dict[str, Any]:
    """Return the table of TOML *text*; *origin* names the file. Raises UsageError."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{origin}: {error}") from None
    except (ValueError, RecursionError):  # thousands of digits or of brackets
        raise UsageError(f"{origin}: not a settings file") from None
    if "mode" in table and _DECIMAL_MODE.search(text):
        raise UsageError(f'{origin}: mode: TOML reads it as decimal; write 0o755 or "0755"')
    return table


def converted(
    known: Mapping[str, Field[Any]], values: Mapping[str, object], origin: str
) -> dict[str, Any]:
    """Return *values* converted to the types of their fields in *known*. Raises UsageError."""
    taken: dict[str, Any] = {}
    for name, value in values.items():
        declared = known.get(name)
        if declared is None:
            raise UsageError(f"{origin}: unknown setting {name!r}{_nearest(known, name)}")
        try:
            taken[name] = convert(declared, value)
        except ValueError as error:
            raise UsageError(f"{origin}: {name}: {error}") from None
    return taken


def _nearest(known: Mapping[str, Field[Any]], name: str) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else "; see `kvfs mount --print-settings`"
