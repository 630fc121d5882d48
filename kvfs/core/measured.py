"""What benches measured, as ``kvfs size`` computes with it. Pure.

Each figure is that of a page, where it stands with the machine and the command that measured it; a
test compares both (tests/core/test_size_command.py).
"""

from typing import Final, NamedTuple

from kvfs.core.sizes import KIB, MIB


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
