"""What the server says to its supervisor while it serves, and that it notices the supervisor's end.

The link is that of kvfs/machine/held_files.py; the other end is mount/supervisor/.
"""

import logging
from typing import Final

import trio

from kvfs.machine.held_files import HeldFiles

_log: Final = logging.getLogger(__name__)


def let_end_calls(held: HeldFiles, abort_fd: int) -> None:
    """Give the supervisor the mount's abort file, for when no server can be had any more.

    Without it (-1) a killed server's callers may wait until ``kvfs umount``.
    """
    if abort_fd < 0 or not held.hold("abort", abort_fd):
        _log.warning("calls on the mount will hang if its server is killed")


async def say_alive(held: HeldFiles) -> None:
    """Tell the supervisor again and again that the event loop runs, from a task of that loop.

    A loop that has stopped says nothing, so the supervisor kills this server and starts another.
    """
    while held.alive_every_s:
        held.say_alive()
        await trio.sleep(held.alive_every_s)


async def notice_its_end(held: HeldFiles) -> None:
    """Return, and log it, once there is no supervisor any more: the mount is served without."""
    while held.receive() is not None:
        await trio.lowlevel.wait_readable(held)
    _log.error(
        "the supervisor has died: this server serves on, but if it dies as well nobody takes its "
        "place and calls may wait until `kvfs umount`; a new mount has a supervisor again"
    )
