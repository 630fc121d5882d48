"""A request trace through a kvfs mount and an XFS with a cleaner, for `kvfs replay`."""
