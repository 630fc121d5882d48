"""How the descriptors that the server may have are shared: its own, and what clients' files cost.

What it needs for itself is kept, so that a client that opens as much as it can keeps the server
from nothing: not from answering `kvfs status`, not from telling how a process ended. All of it is
read anew, because prlimit(2) changes the limit of a running process.
"""

import resource
from typing import Final

#: 256 directories of extents and 256 of identities stay open (storage/fan_out.py).
_DIRECTORIES: Final = 2 * 256
#: Index, sockets, the reserve of machine/processes.py, /dev/fuse, 16 clients each of control socket
#: and events, scrapes; and what is open for the length of one call.
_OTHERS: Final = 128
#: Shares of the limit: processes that are watched, as many of whose threads are looked at, and
#: extents that are ready. A server with few descriptors does without most of them.
_WATCHED: Final = 1 / 16
_READY: Final = 1 / 8


def limit() -> int:
    """Return how many files this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def watched_max() -> int:
    """Return how many processes may be watched; each costs a descriptor, and one of a thread."""
    return int(limit() * _WATCHED)


def ready_max(wanted: int) -> int:
    """Return how many of *wanted* ready extents there may be; each is an open file."""
    return min(wanted, int(limit() * _READY))


def clients_max(ready_extents: int) -> int:
    """Return how many descriptors may serve files that clients have open, all together.

    *ready_extents*: the setting ``ready_extents_max``.
    """
    most = limit()  # once: every open of a file asks
    ready = min(ready_extents, int(most * _READY))
    return max(0, most - _DIRECTORIES - _OTHERS - 2 * int(most * _WATCHED) - ready)
