"""The facade: a store as tests drive it, and look at it, without a name from inside the engine.

The rule. A test that drives a store (one that imports ``Host``, ``host``, ``Drive`` or ``Driven``)
asks this class, and names no class, module or attribute of kvfs/engine/ or kvfs/pool/: when a part
moves, the tables below move with it and no test does. A test of one part on its own names that
part, which is its subject: it drives no store, or is called after the part (test_space.py:
kvfs/pool/space/space.py). Values of kvfs/core/, the device, processes, and the formats on the
device (kvfs/storage/) are everybody's. tests/test_tidy_tests.py holds this.

Cut by idea: ``Requests`` are what clients ask, as the mount passes it on; ``Course`` is time, the
housekeeping and the bounds; ``Faults`` are what fails; ``Looks`` are what can be seen. The figures
that `kvfs status` shows are looked at there (``describe``).
"""

import time
from collections.abc import Collection

from kvfs.core.account import Accounts
from kvfs.core.settings import Settings
from kvfs.devices import Device
from kvfs.engine.attributes import NewAttributes
from kvfs.engine.blocks.allocations import AllocationRequest
from kvfs.engine.store import Store
from kvfs.pool.open.extent_bytes import stamp_ns
from kvfs.pool.open.open_inodes import OpenInode as Opened
from kvfs.pool.open.open_notes import Living, LivingHandle
from kvfs.pool.open.ports import Kernel
from kvfs.storage.outliving import Outliving
from kvfs.storage.syscalls import Syscalls
from tests.support.kernel.kernel_recorder import KernelRecorder
from tests.support.store.driven_course import Course, Turnable
from tests.support.store.driven_faults import Faults
from tests.support.store.driven_looks import Looks
from tests.support.store.driven_requests import Requests

__all__ = ["AllocationRequest", "Driven", "LivingHandle", "NewAttributes", "Opened", "driven"]


class Driven(Requests, Course, Faults, Looks):
    """A running store. *engine* is for those who wire parts of the mount to it."""

    def __init__(self, engine: Store, clock: Turnable[float], calendar: Turnable[int]) -> None:
        self.engine = engine
        self.clock, self.calendar = clock, calendar


def driven(
    device: Device,
    settings: Settings,
    kernel: Kernel | None = None,
    *,
    syscalls: Syscalls | None = None,
    outliving: Outliving | None = None,
    living: Collection[LivingHandle] | None = None,
    accounts: Accounts | None = None,
) -> Driven:
    """Start a store on *device*; *living* handles are taken over. Raises CommandError, OSError.

    *outliving* is left to the next one.
    """
    clock, calendar = Turnable(time.monotonic), Turnable(stamp_ns)
    handles = None if living is None else Living(living)
    store = Store(
        device,
        settings,
        kernel or KernelRecorder(),
        syscalls=syscalls,
        clock_ns=calendar,
        monotonic_s=clock,
        outliving=outliving,
        living=handles,
        accounts=accounts,
    )
    # What the machine lacks decides nothing in a test.
    store.probation_ends._pressure = lambda: 0.0
    if store.read_ahead is not None:
        store.read_ahead._pressure = lambda: 0.0
        store.read_ahead._is_slow = lambda _: False
    if handles is not None:
        store.take_over(handles)
    return Driven(store, clock, calendar)
