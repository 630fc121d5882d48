"""Which folder stands on which: imports point down only. The one table of the architecture.

A module imports from its own folder and from those before it in the table, so no two folders
import each other.
"""

from typing import Final

#: Bottom first.
FLOORS: Final = (
    "kvfs",
    "kvfs.core",
    "kvfs.storage",
    "kvfs.machine",
    "kvfs.devices",
    "kvfs.pool.space",
    "kvfs.pool.open",
    "kvfs.pool.rules",
    "kvfs.pool.durable",
    "kvfs.pool.figures",
    "kvfs.pool",
    "kvfs.engine.names",
    "kvfs.engine.rewrite",
    "kvfs.engine.blocks",
    "kvfs.engine.durability",
    "kvfs.engine.recovery",
    "kvfs.engine.eviction",
    "kvfs.engine",
    "kvfs.client",
    "kvfs.client.nfs",
    "kvfs.bridges",
    "kvfs.doctor",
    "kvfs.bench",
    "kvfs.bench.replay",
    "kvfs.bench.simulate",
    "mount.supervisor",
    "mount.process",
    "mount.fuse",
    "mount.files",
    "mount.requests",
    "mount.control",
    "mount.control.metrics",
    "mount",
    "kvfs.cli",
)

#: Values and rules: no machine, no clock. Of doctor's the rules, and not what gathers facts.
_PURE: Final = ("kvfs.core.", "kvfs.doctor.", "mount.supervisor.states")
_GATHERS: Final = ("kvfs.doctor.gather", "kvfs.doctor.below_mount")


def floor_of(module: str) -> str | None:
    """Return the folder of *module*, or None when the table does not know it."""
    if module in FLOORS:
        return module
    folder = module.rpartition(".")[0]
    return folder if folder in FLOORS else None


def is_pure(module: str) -> bool:
    """Whether *module* sees values only."""
    return module == "kvfs" or (module.startswith(_PURE) and not module.startswith(_GATHERS))
