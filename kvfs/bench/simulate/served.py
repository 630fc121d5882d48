"""A trace served from a pool without files: by the heat and the policies of the engine."""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from math import inf
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Final, NamedTuple

from kvfs.bench.replay.trace import Request
from kvfs.core.admission import GatedLru, Hint
from kvfs.core.evicted import AGES_S
from kvfs.core.eviction_policy import EvictionPolicy, Rank, policy_named
from kvfs.core.types import FIRST_INODE, InodeNo
from kvfs.storage.heat import Heat
from kvfs.storage.syscalls import Syscalls

#: What a block counts as; only the number of blocks matters.
_BLOCK_BYTES: Final = 4 << 20
_HASH_BYTES: Final = 4


class Outcome(NamedTuple):
    """Shares of all accesses in percent: blocks of a prefix that was there; blocks written.

    ``behind``: blocks of a prefix that a tier behind would add, by how long it keeps what is
    evicted (core/evicted.py); ``evicted``: what it would be written.
    """

    prefix_hits: float
    written: float
    behind: Mapping[str, float] = MappingProxyType({})
    evicted: float = 0.0


def policy_for(name: str, blocks: int, budget_bytes: int = 0) -> EvictionPolicy:
    """Return the policy *name* of a pool of *blocks* blocks: of the engine, or the gate.

    *budget_bytes*: what the gate may write a day, 0 if that has no bound.
    """
    if name == GatedLru.name:
        return GatedLru(blocks, budget_bytes=budget_bytes)
    return policy_named(name)


def served(
    requests: Sequence[Request],
    policy: EvictionPolicy,
    blocks_max: int,
    *,
    hints: Sequence[Hint] = (),
    block_bytes: int = 0,
    count: Callable[[], None] | None = None,
) -> Outcome:
    """Serve *requests* from a pool of *blocks_max* blocks.

    *hints* has one for each request, or none at all. *block_bytes*: what a block counts as in a
    budget of writes. *count* is called after each request.
    """
    with TemporaryDirectory() as place:
        pool_fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        try:
            pool = _Pool(pool_fd, policy, blocks_max, block_bytes)
            for number, request in enumerate(requests):
                pool.serve(request, hints[number] if hints else Hint.NONE)
                if count is not None:
                    count()
        finally:
            os.close(pool_fd)
    return pool.outcome()


class _Pool:
    """Serves a prompt as connectors do.

    It looks the blocks up head first, loads those before the first missing one, touches the others
    that are there, and stores the rest. With a gate what is not worth its write is not stored: it
    is judged when the prompt has ended, as if its blocks were in memory until then. What is there
    and is not worth a write goes first, once its client says that the session has ended.
    """

    def __init__(
        self, pool_fd: int, policy: EvictionPolicy, blocks_max: int, block_bytes: int
    ) -> None:
        self._heat = Heat([pool_fd], Syscalls(), epoch=1, read_only=False, policy=policy, now_s=0)
        self._gate = policy if isinstance(policy, GatedLru) else None
        self._blocks_max, self._block_bytes = blocks_max, block_bytes
        self._present: dict[int, InodeNo] = {}
        self._block_of: dict[InodeNo, int] = {}
        self._next_ino = FIRST_INODE
        self._hits = self._written = self._asked = self._evicted = 0
        #: When each block was evicted last, and what tiers behind would have added, by age.
        self._evicted_s: dict[int, float] = {}
        self._behind = dict.fromkeys(AGES_S, 0)

    def outcome(self) -> Outcome:
        """Return what was found and written so far."""
        hits, written, evicted = (
            100 * count / self._asked for count in (self._hits, self._written, self._evicted)
        )
        behind = {age: 100 * count / self._asked for age, count in self._behind.items()}
        return Outcome(hits, written, behind, evicted)

    def serve(self, request: Request, hint: Hint) -> None:
        """Serve one prompt."""
        present, blocks = self._present, request.blocks
        self._heat.run_due(request.at_s)
        self._asked += len(blocks)
        missing = [block for block in blocks if block not in present]
        hits = blocks.index(missing[0]) if missing else len(blocks)
        self._hits += hits
        self._look_behind(blocks[hits:], request.at_s)
        ended: set[int] = set()
        if self._gate is not None:
            self._gate.budget.count(self._written * self._block_bytes, request.at_s)
            names = [name_hash(block) for block in blocks]
            touches = [self._heat.touches(present[one]) if one in present else 0 for one in blocks]
            verdicts = self._gate.judge(names, touches, hint)
            worthy = {one for one, fine in zip(blocks, verdicts, strict=True) if fine}
            missing = [block for block in missing if block in worthy]
            ended = set(blocks) - worthy if hint is Hint.ONCE else ended
        self._written += len(missing)
        for block in blocks:
            if block in present:
                self._heat.touch(present[block])
                if block in ended:
                    self._heat.demote(present[block])
        self._make_room(len(present) + len(missing) - self._blocks_max, request.at_s)
        for block in missing:
            self._store(block)

    def _store(self, block: int) -> None:
        ino = self._next_ino
        self._present[block], self._block_of[ino] = ino, block
        self._heat.put(ino, _BLOCK_BYTES, Rank.PUBLISHED, name_hash(block))
        self._next_ino = InodeNo(ino + 1)

    def _look_behind(self, blocks: Sequence[int], now_s: float) -> None:
        """Count for each tier the *blocks*, from the first one that is missing, that it has."""
        for age, age_s in AGES_S.items():
            since_s = now_s - age_s
            for block in blocks:
                if block not in self._present and self._evicted_s.get(block, -inf) < since_s:
                    break
                self._behind[age] += 1

    def _make_room(self, lacking: int, now_s: float) -> None:
        """Evict *lacking* blocks; a plan may name fewer."""
        heat = self._heat
        while lacking > 0:
            victims = heat.policy.victims(
                heat.columns(), bytes_wanted=lacking * _BLOCK_BYTES, count_max=1 << 20
            )
            if not len(victims):
                return
            lacking -= len(victims)
            for ino in map(InodeNo, victims.tolist()):
                heat.evicted(ino)
                block = self._block_of.pop(ino)
                del self._present[block]
                self._evicted_s[block] = now_s
                self._evicted += 1


def name_hash(block: int) -> int:
    """Return the 32 bits by which policies know the name of *block*: by chance, as in a mount.

    Numbers in a row, or a checksum of them, would never share a slot of a table, as names do.
    """
    digest = hashlib.blake2b(block.to_bytes(8, "little"), digest_size=_HASH_BYTES).digest()
    return int.from_bytes(digest, "little")
