"""A KV-shaped load on any directory: store, look up, load, and check every byte.

The demo runs it through a mount. It stands in for a connector: it has the sizes, names and system
calls of real ones (``kv_shapes``). One wrong byte ends it.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from kvfs.bench import block_client
from kvfs.bench.kv_shapes import (
    SHAPES,
    Bytes,
    KvBlock,
    KvContent,
    KvShape,
    Layout,
    absent_blocks,
    aligned_buffer,
    first_difference,
    plan_blocks,
)
from kvfs.core.errors import VerifyFailed
from kvfs.core.types import PAGE_BYTES, round_up

#: Lookups of absent blocks for each stored one: a new prompt mostly asks for absent ones.
ABSENT_PER_BLOCK: Final = 3
#: LMCache's default number of disk threads.
THREADS: Final = 4


class Span(NamedTuple):
    """When a thread was inside system calls, by time.perf_counter()."""

    begun_s: float
    ended_s: float


@dataclass
class Moved:
    """Bytes that went one way, and when; ``spans`` of several threads overlap."""

    bytes: int = 0
    spans: list[Span] = field(default_factory=list)

    def busy_s(self) -> float:
        """Return the seconds in which at least one thread was moving bytes."""
        busy_s, until_s = 0.0, float("-inf")
        for span in sorted(self.spans):
            busy_s += max(0.0, span.ended_s - max(span.begun_s, until_s))
            until_s = max(until_s, span.ended_s)
        return busy_s

    def rate(self) -> float:
        """Return the GB/s of all threads together, without the time for checks."""
        busy_s = self.busy_s()
        return self.bytes / busy_s / 1e9 if busy_s else 0.0

    def add(self, other: "Moved") -> None:
        """Add *other*."""
        self.bytes += other.bytes
        self.spans += other.spans


@dataclass
class ShapeCounts:
    """What was done to the blocks of one shape; ``direct`` are loads with O_DIRECT."""

    blocks: int = 0
    stored: Moved = field(default_factory=Moved)
    loaded: Moved = field(default_factory=Moved)
    direct: Moved = field(default_factory=Moved)
    verified_bytes: int = 0
    hits: int = 0
    misses: int = 0

    def add(self, other: "ShapeCounts") -> None:
        """Add *other*."""
        for moved, more in (
            (self.stored, other.stored),
            (self.loaded, other.loaded),
            (self.direct, other.direct),
        ):
            moved.add(more)
        self.blocks += other.blocks
        self.verified_bytes += other.verified_bytes
        self.hits += other.hits
        self.misses += other.misses


@dataclass
class LoadReport:
    """What a load did, by shape, and with how many threads at once."""

    threads: int
    tallies: dict[KvShape, ShapeCounts] = field(default_factory=dict)

    def total(self) -> ShapeCounts:
        """Return the sum over all shapes."""
        total = ShapeCounts()
        for tally in self.tallies.values():
            total.add(tally)
        return total


class KvLoad:
    """One load on the directory *root*, about *total_bytes* in all shapes together.

    The same seed makes the same names and bytes, so a later process can load and check what an
    earlier one stored. *progress* is called with the number of bytes that were just moved.
    """

    def __init__(
        self,
        root: Path,
        *,
        total_bytes: int,
        progress: Callable[[int], None],
        seed: int = 0,
        threads: int = THREADS,
    ) -> None:
        self._root = root
        self._progress = progress
        share_bytes = total_bytes // len(SHAPES)
        self._plan = {shape: plan_blocks(shape, share_bytes, seed) for shape in SHAPES}
        self._content = KvContent(seed, max(shape.size_bytes for shape in SHAPES))
        self._rooms = threading.local()
        self.direct = block_client.direct_works(root)
        self.report = LoadReport(threads, {shape: ShapeCounts() for shape in SHAPES})

    @property
    def blocks(self) -> Iterable[KvBlock]:
        """Every block of the load, shape by shape."""
        return (block for blocks in self._plan.values() for block in blocks)

    @property
    def bytes(self) -> int:
        """The bytes of all blocks."""
        return sum(block.shape.size_bytes for block in self.blocks)

    def path(self, block: KvBlock) -> Path:
        """Return the path of *block*."""
        return self._root / block.path

    def store(self) -> None:
        """Look every block up, as a connector does for a new prompt, and store what is missing.

        Raises OSError when the file system refuses, VerifyFailed if a name exists that nobody
        stored.
        """
        self._run(self._store)

    def load(self) -> None:
        """Look every block up, read it and check each byte; then once more with O_DIRECT.

        Raises VerifyFailed if a stored block is gone or a byte of it is wrong.
        """
        self._run(self._load)
        if self.direct:
            self._run(self._load_direct)

    def _run(self, work: Callable[[KvBlock], ShapeCounts]) -> None:
        with ThreadPoolExecutor(self.report.threads, "kv-load") as pool:
            for shape, blocks in self._plan.items():
                waiting = [pool.submit(work, block) for block in blocks]
                try:
                    for done in as_completed(waiting):
                        self.report.tallies[shape].add(done.result())
                        self._progress(shape.size_bytes)
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise

    def _store(self, block: KvBlock) -> ShapeCounts:
        done = ShapeCounts(blocks=1)
        for absent in absent_blocks(block, ABSENT_PER_BLOCK):
            if block_client.look_up(self.path(absent)) is not None:
                raise VerifyFailed(f"{self.path(absent)}: exists, but was never stored")
            done.misses += 1
        if block_client.look_up(self.path(block)) is not None:
            done.hits += 1
            return done
        done.misses += 1
        shape, data = block.shape, self._expected(block).data
        flags = os.O_DIRECT if self.direct and shape.direct else 0
        if shape.layout is Layout.VLLM:
            flags |= os.O_EXCL
        header, rest = data[: shape.header_bytes], data[shape.header_bytes :]
        path, begun_s = self.path(block), time.perf_counter()
        path.parent.mkdir(parents=True, exist_ok=True)
        parts = (header, rest) if header else (rest,)
        block_client.store(self._root / block.draft, path, parts, flags)
        done.stored = Moved(shape.size_bytes, [Span(begun_s, time.perf_counter())])
        return done

    def _load(self, block: KvBlock) -> ShapeCounts:
        moved = self._checked(block, direct=False)
        return ShapeCounts(hits=1, loaded=moved, verified_bytes=moved.bytes)

    def _load_direct(self, block: KvBlock) -> ShapeCounts:
        moved = self._checked(block, direct=True)
        return ShapeCounts(hits=1, direct=moved, verified_bytes=moved.bytes)

    def _checked(self, block: KvBlock, *, direct: bool) -> Moved:
        path, size_bytes = self.path(block), block.shape.size_bytes
        shown_bytes = block_client.look_up(self.path(block))
        if shown_bytes is None:
            raise VerifyFailed(f"{path}: was stored, but is missing")
        if shown_bytes != size_bytes:
            raise VerifyFailed(f"{path}: has {shown_bytes} bytes, {size_bytes} were stored")
        room = self._room("found")  # longer than the block, to notice surplus bytes
        view = room.data[: round_up(size_bytes) + PAGE_BYTES]
        begun_s = time.perf_counter()
        found_bytes = block_client.load(path, view, os.O_DIRECT if direct else 0)
        span = Span(begun_s, time.perf_counter())
        expected, found = self._expected(block), room[:found_bytes]
        offset_bytes = first_difference(expected, found)
        if offset_bytes is not None:
            raise VerifyFailed(_describe(path, offset_bytes, expected, found))
        return Moved(size_bytes, [span])

    def _expected(self, block: KvBlock) -> Bytes:
        return self._content.fill(block.key, self._room("expected"), block.shape.size_bytes)

    def _room(self, purpose: str) -> Bytes:
        room: Bytes | None = getattr(self._rooms, purpose, None)
        if room is None:
            room = aligned_buffer(self._content.longest_bytes + PAGE_BYTES)
            setattr(self._rooms, purpose, room)
        return room


def _describe(path: Path, offset_bytes: int, expected: Bytes, found: Bytes) -> str:
    if offset_bytes == len(found):
        return f"{path}: ends at offset {offset_bytes}, {len(expected)} bytes were stored"
    if offset_bytes == len(expected):
        return f"{path}: continues at offset {offset_bytes}, where the stored block ends"
    return (
        f"{path}: wrong byte at offset {offset_bytes}: "
        f"{found[offset_bytes]:#04x} instead of {expected[offset_bytes]:#04x}"
    )
