"""Which request reader a mount has: the compiled one, or the one in Python, which defines both.

Both answer the same requests alike (tests/fuse/channel/test_compiled_reader_model.py). Where
nothing was compiled, for lack of a compiler, the mount has the one in Python.
"""

import functools
from collections.abc import Callable
from typing import Final, NamedTuple

from mount.fuse.request_reader import TURN_MESSAGES, TURN_NS, Reader, RequestReader

COMPILED: Final = "compiled"
IN_PYTHON: Final = "python"


class ReaderChoice(NamedTuple):
    """How to make the reader (arguments as of RequestReader), and why that one."""

    make: Callable[..., Reader]
    name: str
    reason: str


#: The reader that the other one must equal.
PYTHON: Final = ReaderChoice(RequestReader, IN_PYTHON, "compiled_reader = false")


def look_for_compiled() -> ReaderChoice:
    """Return the compiled reader, or the one in Python where there is none."""
    try:
        from mount.fuse.compiled_reader import CompiledReader
    except ImportError as error:
        return ReaderChoice(RequestReader, IN_PYTHON, f"none was compiled: {error}")
    make = functools.partial(CompiledReader, turn_messages=TURN_MESSAGES, turn_ns=TURN_NS)
    return ReaderChoice(make, COMPILED, "it was compiled at installation")


#: As this module is imported: another version may be installed before a server is forked.
_FOUND: Final = look_for_compiled()


def choose_reader(*, compiled: bool, found: ReaderChoice = _FOUND) -> ReaderChoice:
    """Return the compiled reader if it is wanted and was *found*."""
    return found if compiled else PYTHON
