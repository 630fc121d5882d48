"""The verbs of `kvfs drive` on the control socket: what of a pool's drives changes while it serves.

One change at a time. What a drive is to be is written to it first, in a thread, and counts then.
"""

from typing import Any, Final

import trio

from kvfs.core.errors import ServeFailed, UsageError
from kvfs.engine.eviction.drains import number_of
from kvfs.engine.store import Store
from mount.control.socket import Verb


class DriveVerbs:
    """The verbs of one mount."""

    def __init__(self, store: Store) -> None:
        self._store: Final = store
        self._one: Final = trio.Lock()

    def table(self) -> dict[str, Verb]:
        """Return the verbs by name."""
        return {"drive-drain": self._drain}

    async def _drain(self, args: dict[str, Any]) -> dict[str, Any]:
        """Empty ``drive``, or with ``undo`` let it take blocks again; return what it holds.

        Raises UsageError, DriveNeeded, ServeFailed.
        """
        drains, draining = self._store.drains, args.get("undo") is not True
        if self._store.pool.settings.read_only:
            raise UsageError("the mount is read-only")
        async with self._one:
            drive = drains.drive(number_of(args.get("drive")))
            if draining:
                drains.require_spared(drive)
            if drive.is_draining != draining:
                write = drains.write
                try:
                    header = await trio.to_thread.run_sync(lambda: write(drive, draining=draining))
                except OSError as error:
                    raise ServeFailed(
                        f"drive {drive.number}: its header cannot be written: {error.strerror}"
                    ) from error
                drains.learn(drive, header)
        left = drains.left(drive)
        return {
            "drive": drive.number,
            "state": drive.state.value,
            "blocks": left.blocks,
            "used_bytes": left.used_bytes,
        }
