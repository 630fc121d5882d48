"""One open pool: its space, its open inodes, leases and pins."""
