"""What `kvfs status` shows of a running mount."""

import os
from typing import TYPE_CHECKING, Any

import kvfs
from mount import errno_door
from mount.wire import Opcode

if TYPE_CHECKING:
    from mount.serve import Mount


def describe(mount: "Mount") -> dict[str, Any]:
    """Return the figures of one mount, JSON-ready; sizes in bytes."""
    channel = mount.channel
    return {
        "version": kvfs.__version__,
        "mountpoint": mount.settings.mountpoint,
        "source": mount.settings.source,
        "name": mount.settings.name,
        "read_only": mount.settings.read_only,
        "data_path": mount.path.name,
        "data_path_reason": mount.choice.reason,
        "server_pid": os.getpid(),
        **mount.store.describe(),
        **mount.path.describe(),
        "stalls": {
            "waits": mount.files.room.stalls,
            "waited_s": round(mount.files.room.stalled_s, 3),
            "longest_s": round(mount.files.room.longest_s, 3),
        },
        "notifications": {
            "told": mount.notifier.told,
            "untold": mount.notifier.untold,
            "backlog": mount.notifier.backlog,
        },
        "open_handles": len(mount.handles),
        "requests": _by_name(channel.requests),
        "answered_in_channel": _by_name(channel.answered_here),
        "refused": dict(errno_door.counts),
    }


def _by_name(counts: list[int]) -> dict[str, int]:
    return {
        Opcode(code).name if code in _CODES else f"UNKNOWN_{code}": count
        for code, count in enumerate(counts)
        if count
    }


_CODES = frozenset(code.value for code in Opcode)
