"""What the loads of proofs run with beside the defaults: the gate, and new blocks in memory.

The machine may be short of memory, and then less is in memory than a load asks for.
"""

from typing import Final

#: The order of eviction that learns which blocks are worth their write (docs/simulate.md).
GATE: Final = ("--set", "eviction=gate")


def in_memory(size_bytes: int) -> tuple[str, ...]:
    """Return flags that keep new blocks of up to an eighth of *size_bytes* in memory, judged."""
    return (*GATE, "--set", f"probation_bytes={size_bytes}")
