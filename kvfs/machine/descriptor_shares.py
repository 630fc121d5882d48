"""How the server's descriptors are divided: for its own use, and for files that clients open.

What the server needs is reserved. So a client that opens all it can does not keep the server from
its work, such as answering `kvfs status` or finding out how a process ended. The limit is read at
each call, because prlimit(2) can change that of a running process.
"""

import resource
from typing import Final

#: 256 directories of extents and 256 of identities stay open (storage/fan_out.py).
_DIRECTORIES: Final = 2 * 256
#: Index, sockets, the reserve of machine/processes.py, /dev/fuse, 16 clients each of control socket
#: and events, scrapes; and what is open for the length of one call.
_OTHERS: Final = 128
#: Shares of the limit: for watched processes, as much again for threads that are looked at, and for
#: ready extents. A server with few descriptors has few of these.
_WATCHED: Final = 1 / 16
_READY: Final = 1 / 8


def limit() -> int:
    """Return how many files this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def watched_max() -> int:
    """Return how many processes may be watched; each costs two descriptors, one for a thread."""
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
