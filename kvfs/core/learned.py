"""What a policy learned and a later start may go on with; kept in HEAT (storage/heat_file.py)."""

from typing import NamedTuple, Protocol


class Learned(NamedTuple):
    """Bytes that only the policy reads; empty: there is nothing to keep.

    ``counts`` is small. ``tables`` may take some bytes for each block, and change while they are
    read.
    """

    counts: bytes = b""
    tables: tuple[bytes | bytearray | memoryview, ...] = ()


class Learner(Protocol):
    """Who may know more after a while. By itself it begins anew at each start."""

    def learned(self) -> Learned:
        """Return what is to outlive this process; any thread may ask."""
        return Learned()

    def recall(self, learned: Learned, blocks: int) -> None:
        """Go on with what an earlier process *learned*, of a pool that has *blocks* blocks now.

        What is damaged, of another version or of a pool of another size is ignored.
        """
        return
