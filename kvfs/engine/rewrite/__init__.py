"""O_TRUNC of a block that others may read: the name moves to a fresh inode."""
