"""The pool as a file system: names, blocks, eviction, recovery behind one Store."""
