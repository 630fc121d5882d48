"""Telling systemd the state of the service (sd_notify(3)): one datagram a message."""

import os
import socket


def notify(*assignments: str) -> bool:
    """Send assignments such as ``READY=1``; False where nobody asked for them.

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
