"""The files of a pool, with a module for each: index, extents, inode numbers, heat and others."""
