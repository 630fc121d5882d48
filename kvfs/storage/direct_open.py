"""Opening a file so that reads of it go past the page cache, to the device."""

import os
from collections.abc import Callable


def open_direct(open_with: Callable[[int], int]) -> int:
    """Return what *open_with* opens with O_DIRECT, or with no flag where that is not possible.

    tmpfs has no O_DIRECT everywhere. Raises what *open_with* raises without it.
    """
    try:
        return open_with(os.O_DIRECT)
    except OSError:
        return open_with(0)
