"""Whose the blocks are, as eviction sees it: columns of numbers.

A tenant is a slot, a small number. The columns by slot are those that storing and evicting write
to: who keeps them sees the present.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Owners(NamedTuple):
    """Columns about tenants: one a block, and some a slot."""

    #: The slot of the tenant of each block; later rows are of slot 0.
    slot: NDArray[np.uint16]
    #: Allocated bytes of each slot's blocks, whether they may go or not; but not of those that
    #: another tenant keeps.
    stored_bytes: NDArray[np.int64]
    #: Bytes of each slot's blocks that went, since the server started.
    gone_bytes: NDArray[np.int64]
    #: How large a part of the pool each slot may have, beside those of others.
    weight: NDArray[np.float64]
    #: Who had a use of a block at this stamp or later has a share (``Columns.touched``).
    idle_stamp: int
    #: ``stored_bytes`` and ``gone_bytes`` as they were when the columns were handed out.
    stored_then_bytes: NDArray[np.int64]
    gone_then_bytes: NDArray[np.int64]
