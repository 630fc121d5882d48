"""The two sockets between the channel and libfuse, and the room in them.

Each request or reply is one message (SOCK_SEQPACKET). READ and WRITE never pass here
(mount/requests/data.py), so the largest carries an extended attribute or a listing: 64 KiB.
"""

import socket
from typing import Final

from kvfs.core.errors import ServeFailed

#: More than any burst of replies takes.
_WANTED_BYTES: Final = 4 << 20
#: The least buffer, as getsockopt(2) tells it: twice what was asked for (socket(7)). It holds a 64
#: KiB message and one small reply of each of pyfuse3's 256 tasks (1,280 bytes in an sk_buff). The
#: default of net.core.wmem_max gives 416 KiB.
ROOM_MIN_BYTES: Final = 384 << 10
#: socket(7), asm-generic/socket.h: beyond wmem_max, with CAP_NET_ADMIN.
_SO_SNDBUFFORCE: Final = 32


def libfuse_pair(wanted_bytes: int = _WANTED_BYTES) -> tuple[socket.socket, socket.socket]:
    """Return our end and libfuse's, both non-blocking.

    Without CAP_NET_ADMIN they have as much of *wanted_bytes* as net.core.wmem_max allows. Raises
    ServeFailed if that is too little: a message that did not fit would fail a caller's request.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setblocking(False)
        # The sender's buffer alone bounds what is under way (unix_dgram_sendmsg, net/unix).
        try:
            end.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, wanted_bytes)
        except PermissionError:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, wanted_bytes)
    room_bytes = ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    if room_bytes < ROOM_MIN_BYTES:
        ours.close()
        theirs.close()
        raise ServeFailed(
            f"a socket's buffer has {room_bytes} bytes, and {ROOM_MIN_BYTES} are needed; "
            f"`sysctl net.core.wmem_max=212992` raises it, or CAP_NET_ADMIN"
        )
    return ours, theirs
