"""What a stated load needs: capacity, memory, CPU, and how long a drive lasts. Pure.

The reverse, how long blocks stay in a given capacity, follows from the same figures. Each of those
that benches measured is that of a page, where it stands with the machine and the command that
measured it; a test compares both (tests/core/test_size_command.py).
"""

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

from kvfs.core.headroom import LEAD_S, Headroom
from kvfs.core.index_room import ROWS_BYTES
from kvfs.core.settings import Settings
from kvfs.core.sizes import DAY_S, KIB, MIB
from kvfs.core.types import round_up


class Measured(NamedTuple):
    """A figure, the page in docs/ that has it, and how that says it."""

    value: float
    document: str
    words: str


#: CPU of the server, in seconds, on two cores with drives in memory.
STORE_CPU_S: Final = Measured(461.0e-6, "performance.md", "| CPU, store cycle | 461.0 us |")
OPEN_CPU_S: Final = Measured(35.9e-6, "performance.md", "| CPU, warm open + close | 35.9 us |")
#: For a decimal GB that is loaded.
LOADED_GB_CPU_S: Final = Measured(
    9.1e-3, "performance.md", "| CPU, load of 32 MiB blocks | 9.1 ms/GB |"
)
#: Memory of the processes of a mount, without blocks.
SERVER_BYTES: Final = Measured(52 * MIB, "performance.md", "together hold some 52 MiB, by Pss")
SUPERVISOR_BYTES: Final = Measured(6 * MIB, "performance.md", "supervisor (RssAnon 6 MiB)")
#: Memory for each block of the pool: of the server, and of an adaptive order of eviction, at most.
BLOCK_BYTES: Final = Measured(56, "eviction.md", "a million blocks (RssAnon) | 56 MB")
ADAPTIVE_BLOCK_BYTES: Final = Measured(80, "eviction.md", "40 to 80 bytes a block")
#: Kernel memory of a block that stays open for passthrough.
BACKING_ID_BYTES: Final = Measured(1.7 * KIB, "configuration.md", "memory: 1.7 KiB each")
#: Copies and log of the index on the drive, for each name, at most.
LOG_NAME_BYTES: Final = Measured(1700, "sizing.md", "up to some 1,700 bytes a name")
#: What the index has allocated ahead.
INDEX_AHEAD_BYTES: Final = Measured(16 * MIB, "sizing.md", "550 bytes a name, and 16 MiB ahead")
#: Bytes written to the drive for a byte stored, by the size of the blocks, the largest first.
WRITTEN: Final = (
    (32 * MIB, Measured(1.0023, "dev/measuring.md", "| 1.0023 / 1.0002 |")),
    (4 * MIB, Measured(1.0007, "dev/measuring.md", "| 4 MiB | 20 | 1.0007 |")),
    (64 * KIB, Measured(1.06, "dev/measuring.md", "| 64 KiB | 100 | 1.06 |")),
)


#: Below it a pool evicts badly (docs/sizing.md, "Not too few blocks").
BLOCKS_FEW: Final = 200
#: The index evicts for names before its map is full (index_room.py).
_MAP_SHARE: Final = 7 / 8


class Load(NamedTuple):
    """What clients do, and for how long blocks are to stay or how much they may take."""

    block_bytes: int
    stores_s: float
    loads_s: float = 0.0
    keep_s: float | None = None
    capacity_bytes: int | None = None
    endurance_bytes: int | None = None
    is_adaptive: bool = False

    @property
    def stored_bytes_s(self) -> float:
        """Bytes stored a second."""
        return self.stores_s * self.block_bytes


class Needs(NamedTuple):
    """What that takes; ``keep_s`` and ``capacity_bytes`` follow from each other."""

    blocks: int
    blocks_bytes: int
    keep_s: float
    capacity_bytes: int
    headroom_bytes: int
    ready_bytes: int
    log_bytes: int
    processes_bytes: int
    blocks_memory_bytes: int
    index_memory_bytes: int
    kernel_memory_bytes: int
    store_cores: float
    load_cores: float
    written_bytes_day: float
    life_days: float | None

    @property
    def memory_bytes(self) -> int:
        """All memory."""
        of_server = self.processes_bytes + self.blocks_memory_bytes
        return of_server + self.index_memory_bytes + self.kernel_memory_bytes

    @property
    def cores(self) -> float:
        """Cores that the server keeps busy."""
        return self.store_cores + self.load_cores


def needs_of(load: Load) -> Needs:
    """Return what *load* needs; it has ``keep_s`` or ``capacity_bytes``."""
    allocated_bytes = round_up(load.block_bytes)
    if load.capacity_bytes is None:
        assert load.keep_s is not None, "one of the two is given"
        blocks = max(1, round(load.stores_s * load.keep_s))
        capacity_bytes = _capacity_for(blocks * allocated_bytes, load)
        keep_s = load.keep_s
    else:
        capacity_bytes = load.capacity_bytes
        blocks = (capacity_bytes - sum(_kept_free(load, capacity_bytes))) // allocated_bytes
        keep_s = blocks / load.stores_s
    headroom_bytes, ready_bytes = _kept_free(load, capacity_bytes)
    of_block = BLOCK_BYTES.value
    of_block += ADAPTIVE_BLOCK_BYTES.value if load.is_adaptive else 0
    ids = min(blocks, Settings().backing_ids_max)
    written_bytes_s = load.stored_bytes_s * written_for(load.block_bytes)
    endurance_bytes = load.endurance_bytes
    return Needs(
        blocks=blocks,
        blocks_bytes=blocks * allocated_bytes,
        keep_s=keep_s,
        capacity_bytes=capacity_bytes,
        headroom_bytes=headroom_bytes,
        ready_bytes=ready_bytes,
        log_bytes=int(blocks * LOG_NAME_BYTES.value),
        processes_bytes=int(SERVER_BYTES.value + SUPERVISOR_BYTES.value),
        blocks_memory_bytes=int(blocks * of_block),
        index_memory_bytes=int(blocks * ROWS_BYTES + INDEX_AHEAD_BYTES.value),
        kernel_memory_bytes=int(ids * BACKING_ID_BYTES.value),
        store_cores=load.stores_s * STORE_CPU_S.value,
        load_cores=load.loads_s * _load_cpu_s(load.block_bytes),
        written_bytes_day=written_bytes_s * DAY_S,
        life_days=None if endurance_bytes is None else endurance_bytes / written_bytes_s / DAY_S,
    )


def warnings_of(load: Load, needs: Needs) -> Iterator[str]:
    """Yield what stands against it, each with what helps."""
    if needs.blocks < BLOCKS_FEW:
        yield (
            f"a pool of {needs.blocks:,} blocks evicts badly: give it room for some {BLOCKS_FEW}, "
            "and for ten times what all writers store at once"
        )
    if needs.cores > 1:
        yield (
            f"a server has one event loop, and this is {needs.cores:.1f} cores: store larger "
            "blocks, or spread them over several mounts"
        )
    map_bytes = Settings().index_map_bytes
    if needs.blocks * ROWS_BYTES > map_bytes * _MAP_SHARE:
        yield "these are more names than the index takes: raise index_map_bytes"
    smallest_bytes, found = WRITTEN[-1]
    if load.block_bytes < smallest_bytes:
        yield (
            f"blocks below {smallest_bytes >> 10} KiB are not measured: they write more than "
            f"{found.value:g} bytes for a byte stored, so the drive lasts less long"
        )


def written_for(block_bytes: int) -> float:
    """Return the bytes written for a byte stored, measured with blocks that are no larger."""
    known = (found.value for size_bytes, found in WRITTEN if size_bytes <= block_bytes)
    return next(known, WRITTEN[-1][1].value)


def _kept_free(load: Load, capacity_bytes: int) -> tuple[int, int]:
    """Return the headroom, and what is prepared for the next stores (ready_extents.py)."""
    settings, allocated_bytes = Settings(), round_up(load.block_bytes)
    headroom_bytes = Headroom(capacity_bytes).bytes_at(load.stores_s * allocated_bytes)
    extents = min(math.ceil(load.stores_s * LEAD_S), settings.ready_extents_max)
    ready_bytes = min(extents * allocated_bytes, int(settings.ready_share * capacity_bytes))
    return headroom_bytes, ready_bytes


def _capacity_for(blocks_bytes: int, load: Load) -> int:
    """Return the capacity in which so many bytes of blocks stay beside what is kept free."""
    capacity_bytes = blocks_bytes
    while (needed_bytes := blocks_bytes + sum(_kept_free(load, capacity_bytes))) > capacity_bytes:
        capacity_bytes = needed_bytes
    return round_up(capacity_bytes)


def _load_cpu_s(block_bytes: int) -> float:
    """Return the CPU of a load: an open and a close, or what its bytes cost if that is more."""
    return max(OPEN_CPU_S.value, block_bytes / 1e9 * LOADED_GB_CPU_S.value)
