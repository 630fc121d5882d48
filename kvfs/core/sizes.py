"""Sizes, counts and ages as people write them: ``10G``, ``500MiB``, ``12,000 blocks``, ``7d``.

Suffixes are binary (K = 1024), because every size in kvfs ends up as a number of 4 KiB blocks.
"""

import re
from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40
DAY_S: Final = 86_400

_UNITS: Final = {"": 1, "K": KIB, "M": MIB, "G": GIB, "T": TIB, "P": 1 << 50}
_SIZE: Final = re.compile(r"\s*(\d{1,18})(?:\.(\d{1,6}))?\s*([KMGTP]?)(?:i?B)?\s*", re.IGNORECASE)
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": DAY_S, "w": 604_800}
_AGE: Final = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)([smhdw])")


def parse_size(text: str) -> int:
    """Return the number of bytes that *text* names. Raises ValueError if it is not a size."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write bytes or a number with K, M, G or T")
    whole, fraction, unit = match.groups()
    unit_bytes = _UNITS[unit.upper()]
    part_bytes = int(fraction) * unit_bytes // 10 ** len(fraction) if fraction else 0
    return int(whole) * unit_bytes + part_bytes


def shown_rate(rate: float | None) -> str:
    """Return a share (0 to 1) as a percentage, or a dash if there is none yet."""
    return "-" if rate is None else f"{100 * rate:.1f} %"


def format_size(size_bytes: int) -> str:
    """Return *size_bytes* for a reader: exact if it is a round number, else with two decimals."""
    for suffix in ("P", "T", "G", "M", "K"):
        unit_bytes = _UNITS[suffix]
        if size_bytes >= unit_bytes:
            number = size_bytes / unit_bytes
            text = (
                str(size_bytes // unit_bytes) if size_bytes % unit_bytes == 0 else f"{number:.2f}"
            )
            return f"{text} {suffix}iB"
    return f"{size_bytes} B"


def short_size(size_bytes: float) -> str:
    """Return *size_bytes* in at most seven characters, for a column of a narrow terminal."""
    for suffix in ("P", "T", "G", "M", "K"):
        if size_bytes >= _UNITS[suffix]:
            number = size_bytes / _UNITS[suffix]
            return f"{number:.{1 if number < 100 else 0}f} {suffix}"
    return f"{size_bytes:.0f} B"


def short_count(count: float) -> str:
    """Return *count* in at most seven characters, if it is below 10^12."""
    if count < 1e5:
        return f"{count:,.0f}"
    return f"{count / 1e3:,.0f} k" if count < 1e7 else f"{count / 1e6:,.0f} M"


def parse_age(text: str) -> float:
    """Return the seconds of an age such as ``7d``. Raises ValueError if *text* is not an age."""
    match = _AGE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an age; write a number and s, m, h, d or w")
    return float(match[1]) * _UNITS_S[match[2]]


def count_of(count: int, one: str, many: str = "") -> str:
    """Return *count* with its noun; *many* is the plural if it is not *one* with an s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
