"""The text of settings, TOML or flags: read and checked, or a UsageError of one line."""

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import Field
from typing import Any, Final

from kvfs.core.errors import UsageError
from kvfs.core.setting_values import convert

#: 755 would be 01363, which anybody may write to.
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
    """Return *values* as the fields *known* take them. Raises UsageError."""
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
