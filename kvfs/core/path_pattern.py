"""Path patterns like a shell's: ``*``, ``?``, ``[...]`` in a name, ``**`` for any names.

A walk down a tree matches a name at a time, so it never enters a directory below which nothing can
match. The time per name is bounded: patterns do not backtrack as some regular expressions do
(fnmatch.translate of Python 3.11 makes atomic groups).
"""

import fnmatch
import re
from typing import Final

from kvfs.core.types import PATH_MAX_BYTES

#: A walk's position in a pattern: the numbers of the parts that the next name may match.
Reached = frozenset[int]

_NOWHERE: Final = frozenset({".", ".."})


class PathPattern:
    """One pattern of paths relative to the mountpoint, such as ``lmcache/model@*``.

    Unlike in a shell, ``*`` also matches a dot at the beginning of a name.
    """

    def __init__(self, text: str) -> None:
        """Raises ValueError if no path can match *text*."""
        names = [name for name in text.split("/") if name]
        if not names:
            raise ValueError("the pattern is empty")
        if len(text) > PATH_MAX_BYTES:
            raise ValueError(f"the pattern is longer than {PATH_MAX_BYTES} characters")
        if not _NOWHERE.isdisjoint(names):
            raise ValueError(f"{text!r}: leave out '.' and '..'")
        if names[-1] == "**":
            names.append("*")  # what lies below, and not the directory itself
        #: None stands for ``**``.
        self._parts = [
            None if name == "**" else re.compile(fnmatch.translate(name)) for name in names
        ]
        #: The position of a walk that is at the mountpoint.
        self.start: Final = self._widened({0})

    def after(self, reached: Reached, name: bytes) -> Reached:
        """Return the position after *name*, from position *reached*.

        It is empty if nothing at or below the name can match.
        """
        text = name.decode(errors="surrogateescape")
        found = set[int]()
        for at in reached:
            part = self._parts[at] if at < len(self._parts) else None
            if at < len(self._parts) and part is None:
                found.add(at)
            elif part is not None and part.match(text):
                found.add(at + 1)
        return self._widened(found)

    def is_matched(self, reached: Reached) -> bool:
        """Whether the path walked so far matches the whole pattern."""
        return len(self._parts) in reached

    def _widened(self, reached: set[int]) -> Reached:
        """Return *reached* and what follows it when ``**`` matches no name."""
        for at in sorted(reached):
            while at < len(self._parts) and self._parts[at] is None:
                at += 1
                reached.add(at)
        return frozenset(reached)
