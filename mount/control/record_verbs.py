"""The verbs of `kvfs record` on the control socket: which blocks were used, by numbers.

``record`` begins a recording, ``recorded`` returns what was used since the last call. Its client
asks as often as it likes to know; nothing is kept for it but what tells the next look where to
begin, and blocks that go in between (touch_recordings.py).
"""

import contextlib
from typing import Any, Final

from kvfs.core.errors import UsageError
from kvfs.core.types import SECOND_NS
from kvfs.engine.eviction.space_figures import for_blocks_bytes
from kvfs.engine.store import Store
from kvfs.pool.figures.touch_recordings import KeyedNames
from mount.control.socket import Verb

#: Blocks of a reply: some 6 KiB, made in 0.1 ms, while requests wait.
BLOCKS_A_REPLY: Final = 512


class RecordVerbs:
    """The verbs of one mount."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def table(self) -> dict[str, Verb]:
        """Return the verbs by name."""
        return {"record": self._record, "recorded": self._recorded}

    async def _record(self, args: dict[str, Any]) -> dict[str, Any]:
        """Begin; ``key`` (hex) is what numbers follow from. Return number and sizes."""
        pool = self._store.pool
        if pool.settings.read_only:
            raise UsageError("the mount is read-only, and does not know which blocks are used")
        names = KeyedNames(_key_of(args))
        return {
            "recording": pool.figures.recordings.begin(names),
            "name": pool.settings.name,
            "capacity_bytes": pool.space.taken.capacity_bytes,
            "for_blocks_bytes": for_blocks_bytes(pool),
            **self._so_far(),
        }

    async def _recorded(self, args: dict[str, Any]) -> dict[str, Any]:
        """Return what was used since the last call; with ``end`` the recording is over then.

        ``more``: there is more of it, so call again. ``gone``: there is no such recording.
        """
        number, recordings = args.get("recording", 0), self._store.pool.figures.recordings
        recording = recordings.asked(number) if isinstance(number, int) else None
        if recording is None:
            return {"gone": True}  # it was made by another server: the client begins a new one
        used = recording.pop(BLOCKS_A_REPLY)
        if args.get("end") is True and used.is_all:
            recordings.end(number)
        return {
            "blocks": used.numbers.tolist(),
            "bytes": int(used.sizes_bytes.sum()),
            "lost": used.lost,
            "more": not used.is_all,
            **self._so_far(),
        }

    def _so_far(self) -> dict[str, Any]:
        """Return the time, and hits and misses since the server began."""
        pool = self._store.pool
        hits, misses = pool.figures.asked()
        return {"time": round(pool.age_ns() / SECOND_NS, 3), "hits": hits, "misses": misses}


def _key_of(args: dict[str, Any]) -> bytes:
    """Return the bytes of ``key``. Raises UsageError."""
    key = args.get("key")
    with contextlib.suppress(ValueError):
        if isinstance(key, str) and (found := bytes.fromhex(key)):
            return found
    raise UsageError("key: must be bytes in hex")
