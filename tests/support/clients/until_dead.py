"""A client that stores, lists and looks until a call fails, and tells which, and how long it took.

``python -m tests.support.clients.until_dead DIRECTORY NAME KEPT``: what it stores in DIRECTORY,
under names that begin with NAME, may be evicted; the first KEPT blocks go to DIRECTORY/kept, where
none is. It prints one JSON object at its end.
"""

import json
import os
import sys
import time
from typing import Any, Final

from tests.support.clients.stamped import stamped

SIZE: Final = 256 << 10
#: The client is not the one that ends the test.
_TURNS_MAX: Final = 100_000


def store(path: str, name: str) -> None:
    """Store a block by temporary name and rename."""
    fd = os.open(f"{path}.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.write(fd, stamped(name, SIZE))
    finally:
        os.close(fd)
    os.rename(f"{path}.tmp", path)


def go_on(directory: str, name: str, kept: int) -> dict[str, Any]:
    """Go on until a call fails; tell of it, and of the blocks that were stored to be kept."""
    acknowledged: list[str] = []
    for number in range(_TURNS_MAX):
        block = f"{name}-{number}"
        began_s = time.monotonic()
        try:
            if number < kept:
                store(f"{directory}/kept/{block}", block)
                acknowledged.append(block)
            store(f"{directory}/{block}", block)
            os.path.exists(f"{directory}/{block}-missing")
            os.listdir(f"{directory}/kept")
        except OSError as error:
            took_s = time.monotonic() - began_s
            return {"errno": error.errno, "took_s": took_s, "acknowledged": acknowledged}
    raise AssertionError("no call failed")


if __name__ == "__main__":
    print(json.dumps(go_on(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
