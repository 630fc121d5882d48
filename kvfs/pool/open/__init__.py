"""The open inodes, the extents that drafts begin with, and the ports to what is above."""
