"""One open pool: its space, its open inodes, what belongs to whom."""
