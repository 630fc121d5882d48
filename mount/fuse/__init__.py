"""The kernel's side: /dev/fuse, its messages, its mount."""
