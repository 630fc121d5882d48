"""Which handles of an open inode are file servers' (engine/blocks/served.py decides it)."""

#: Size in bytes and mtime (ns) of an extent; a write changes one of them at least.
Shown = tuple[int, int]


class ServedHandles:
    """The handles of file servers, a part of an ``OpenInode``. Defaults are class attributes."""

    #: How many of its readers and writers are file servers (file_servers.py).
    served_readers = 0
    served_writers = 0
    #: How many of both are on passthrough, which only the file server can end.
    served_passing = 0
    #: Bytes of the capacity that ``served_passing`` keeps, as last counted.
    passing_bytes = 0
    #: Whether one of ``served_writers`` has no handle: it keeps an emptied file open (served.py).
    kept_open = False
    #: How many of ``served_readers`` could write, but have not for long.
    quiet_writers = 0
    #: What the extent showed when the last of ``quiet_writers`` became one.
    left_as: Shown = (-1, 0)
    #: How often kvfs itself is changing its mtime, which is no late write.
    touches = 0

    def serve(self, *, writer: bool, passing: bool) -> None:
        """One more handle is a file server's."""
        self.served_passing += passing
        if writer:
            self.served_writers += 1
        else:
            self.served_readers += 1

    def stop_passing(self, *, passing: bool) -> None:
        """A file server closes a handle, which was perhaps on passthrough."""
        self.served_passing -= passing

    def stop_serving(self, *, writer: bool) -> bool:
        """A file server closes a handle; return whether it still counts as a *writer*'s."""
        writes = writer and not self.quiet_writers
        if writes:
            self.served_writers -= 1
        else:
            self.served_readers -= 1
            self.quiet_writers -= writer
        return writes

    def count_passing(self, allocated_bytes: int) -> int:
        """Count what passthrough keeps of *allocated_bytes*; return by how much that has grown."""
        now_bytes = allocated_bytes if self.served_passing else 0
        growth_bytes = now_bytes - self.passing_bytes
        self.passing_bytes = now_bytes
        return growth_bytes

    def keep_open(self) -> None:
        """One of its writers is kept for a file server that has no handle."""
        self.kept_open = True

    def quieten(self) -> tuple[int, int]:
        """Its file servers' writers count as readers; return how many, and those with a handle."""
        writers, self.served_writers = self.served_writers, 0
        handles = writers - self.kept_open
        self.kept_open = False
        self.served_readers += handles
        self.quiet_writers += handles
        return writers, handles

    def write_late(self) -> None:
        """One of the quiet ones has written, and is a writer again."""
        self.quiet_writers -= 1
        self.served_readers -= 1
        self.served_writers += 1

    def note_left(self, size_bytes: int, mtime_ns: int) -> None:
        """Note what the extent was like when its writers became quiet."""
        self.left_as = (size_bytes, mtime_ns)

    def begin_touch(self) -> None:
        """Kvfs changes the mtime of the extent; until ``end_touch`` no late write can be told."""
        self.touches += 1

    def end_touch(self, before: Shown | None, after: Shown | None) -> None:
        """The extent showed *before* and then *after*, through kvfs alone; None: nothing."""
        self.touches -= 1
        # If it was left otherwise, a server has written before, which shows still.
        if after is not None and self.left_as == before:
            self.left_as = after
