"""The verbs of `kvfs sync` on the control socket: what is published now becomes durable.

``sync`` notes what that is, ``synced`` returns how much is left. The durable pass hurries while
clients ask, and returns to its own pace when they go away.
"""

import time
from itertools import count
from typing import Any, Final

import trio
import trio.lowlevel

from kvfs.core.durable_pace import DurableGoal
from kvfs.core.errors import SyncedTooLittle, UsageError
from kvfs.core.inode_rules import Ascent
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.engine.names.named import find
from kvfs.engine.store import Store
from mount.control.socket import Verb

#: Blocks looked at between two requests, some 2 us each.
_STEP: Final = 512
#: The most waits at once; for one more the oldest is forgotten.
_WAITS_MAX: Final = 64


class _Wait:
    """What one client waits for: some blocks, or all of them (None), and a flush.

    The blocks are known once the goal is set.
    """

    def __init__(self, goal: DurableGoal, tops: set[InodeNo]) -> None:
        """*tops*: the inodes that the client named; none: all blocks."""
        self.goal = goal
        self.tops = tops
        self.blocks: dict[InodeNo, int] | None = None
        self.is_known = False


class SyncVerbs:
    """The verbs of one mount."""

    def __init__(self, store: Store) -> None:
        self._store = store
        #: Numbers of waits. An earlier server of this mount had others: its clients may still ask.
        self._numbers = count(time.monotonic_ns())
        self._waits: dict[int, _Wait] = {}

    def table(self) -> dict[str, Verb]:
        """Return the verbs by name."""
        return {"sync": self._sync, "synced": self._synced}

    async def _sync(self, args: dict[str, Any]) -> dict[str, Any]:
        """Note what is published below ``paths`` now; return its number, blocks and bytes."""
        paths = args.get("paths", [])
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise UsageError("paths: must be a list of strings")
        pool = self._store.pool
        if pool.settings.read_only:
            raise UsageError("the mount is read-only")
        self._store.blocks.last_closes.settle()
        tops = {find(pool.index, self._store.namespace, path) for path in paths}
        wait = _Wait(self._store.durable_pass.goal(), set() if ROOT_INODE in tops else tops)
        blocks = await self._find_blocks(wait)
        number = next(self._numbers)
        self._waits[number] = wait
        if len(self._waits) > _WAITS_MAX:
            del self._waits[next(iter(self._waits))]
        return {"wait": number, "blocks": len(blocks), "bytes": sum(blocks.values())}

    async def _find_blocks(self, wait: _Wait) -> dict[InodeNo, int]:
        """Return the blocks that *wait* waits for, by size; final once its goal is set."""
        is_known = wait.goal.is_set
        listed = dict(self._store.pool.durable.not_durable.sizes())
        blocks = await self._below(wait.tops, listed) if wait.tops else listed
        if is_known:
            wait.blocks, wait.is_known = (blocks if wait.tops else None), True
        return blocks

    async def _below(self, tops: set[InodeNo], listed: dict[InodeNo, int]) -> dict[InodeNo, int]:
        """Return those of the *listed* blocks that are *tops*, or lie below one."""
        index = self._store.pool.index
        inside: dict[InodeNo, bool] = {ROOT_INODE: False, **dict.fromkeys(tops, True)}
        found: dict[InodeNo, int] = {}
        for number, (ino, size_bytes) in enumerate(listed.items(), 1):
            chain: list[InodeNo] = []
            above, ascent = ino, Ascent()
            while above not in inside and ascent.goes_on(above):
                if (record := index.inode_or_miss(above)) is None:
                    break
                chain.append(above)
                above = record.parent
            inside.update(dict.fromkeys(chain[1:], inside.get(above, False)))
            if inside.get(above, False):
                found[ino] = size_bytes
            if number % _STEP == 0:
                await trio.lowlevel.checkpoint()
        return found

    async def _synced(self, args: dict[str, Any]) -> dict[str, Any]:
        """Return what is left of the wait with number ``wait``; ``gone`` if there is none."""
        number = args.get("wait", 0)
        wait = self._waits.get(number) if isinstance(number, int) else None
        if wait is None:
            return {"gone": True}  # it was made by another server: the client asks for a new one
        durable_pass, pool = self._store.durable_pass, self._store.pool
        queue = pool.durable.not_durable
        try:
            done = durable_pass.reached(wait.goal)
        except OSError as error:
            raise SyncedTooLittle(f"{error.strerror}; see the server's log") from error
        if not wait.is_known:
            await self._find_blocks(wait)
        undone = list(queue.undone(wait.goal.ticket))
        if wait.blocks is not None:
            undone = [ino for ino in undone if ino in wait.blocks]
        flushed = durable_pass.is_flushed(wait.goal)
        flushed = flushed and not pool.durable.identities.attributes.undone(wait.goal.attributes)
        held = [ino for ino in queue.held_inos() if wait.blocks is None or ino in wait.blocks]
        return {
            "done": done or (wait.is_known and flushed and not undone),
            "blocks": len(undone),
            "held_blocks": len(held),
        }
