"""What the writers of an open inode may take without asking, and what they took.

A draft gets its likely size ahead of its writes. How much is decided by allocator.py, and what was
taken beyond it is counted there; here is what is known of one inode.
"""

from kvfs.core.types import NO_INODE, InodeNo


class DraftReserve:
    """The reserve, a part of an ``OpenInode``. Defaults are class attributes."""

    #: The directory in which a draft was created, for the size forecast; 0 for other blocks.
    created_in = NO_INODE
    #: Bytes reserved beyond the usual size of its directory, so that it does not outgrow them.
    spare_bytes = 0
    #: Bytes kept free in case it outgrows them, for this draft and all others together.
    outgrowing_bytes = 0
    #: Whether it is likely to outgrow its reserve.
    unreserved = False
    #: Whether each write must ask for space, on the daemon path, from first to last handle.
    through_daemon = False
    #: Bytes that it took beyond its reserve between the last two checks.
    outgrown = 0
    #: All bytes that it took beyond its reserve.
    taken_unasked = 0

    @property
    def runs_free(self) -> bool:
        """Whether its writers may take any amount until the next check."""
        return self.unreserved and not self.through_daemon

    def foresee(self, directory: InodeNo) -> None:
        """It is a draft in *directory*, whose forecast is to learn its size."""
        self.created_in = directory

    def tell_size(self) -> None:
        """The forecast has learned its size."""
        self.created_in = NO_INODE

    def rely(self, outgrowing_bytes: int) -> None:
        """Its likely size is reserved; *outgrowing_bytes* are kept free for all such drafts."""
        self.unreserved, self.outgrowing_bytes = False, outgrowing_bytes

    def run_free(self) -> None:
        """Its writers may take any amount until the next check."""
        self.unreserved, self.through_daemon = True, False

    def lack(self) -> None:
        """It is likely to outgrow its reserve, and there is no space to let it: it must ask."""
        self.unreserved = self.through_daemon = True

    def must_ask(self) -> None:
        """Each of its writes must ask for space."""
        self.through_daemon = True

    def need_not_ask(self) -> None:
        """It has no writer any more, and only writers must ask."""
        self.through_daemon = False

    def has_asked(self) -> None:
        """Its writer asked for space: it is expected to take no more without asking."""
        self.unreserved = False

    def spare(self, size_bytes: int) -> int:
        """Set its spare bytes; return by how much they have grown."""
        growth_bytes = size_bytes - self.spare_bytes
        self.spare_bytes = size_bytes
        return growth_bytes

    def take_unasked(self, growth_bytes: int) -> None:
        """It grew by *growth_bytes* (perhaps below 0) since the last check."""
        self.outgrown = max(growth_bytes, 0)
        self.taken_unasked += self.outgrown

    def is_stopped(self) -> None:
        """Its writer gets an error from now on, so nothing more is to be expected."""
        self.outgrown = 0
