"""What systemd is told of the server, and how often it wants to hear that the server lives.

One datagram a message, as sd_notify(3) and sd_watchdog_enabled(3) have it; without systemd nothing
is sent.
"""

import os
import socket
from typing import Final

import trio

#: Of the time after which systemd takes the server for dead; sd_watchdog_enabled(3) wants a half.
_SHARE: Final = 1 / 3


def notify(*assignments: str) -> bool:
    """Send assignments such as ``READY=1`` to systemd; False if it did not ask for them.

    Never raises and never blocks: a lost message must not cost the mount.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):  # the abstract namespace of unix(7)
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        channel.setblocking(False)
        try:
            channel.sendto("\n".join(assignments).encode(), address)
        except OSError:
            return False
    return True


def watchdog_s() -> float:
    """Return the seconds after which a silent server is killed (WatchdogSec=); 0 if it is not."""
    try:
        meant = int(os.environ.get("WATCHDOG_PID", os.getpid()))
        wait_s = int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6
    except ValueError:
        return 0.0
    return wait_s if meant == os.getpid() else 0.0


async def say_alive() -> None:
    """Tell systemd again and again that the event loop runs, from a task of that loop.

    A loop that has stopped says nothing, so systemd kills the server and starts it again.
    """
    every_s = watchdog_s() * _SHARE
    while every_s:
        notify("WATCHDOG=1")
        await trio.sleep(every_s)
