"""The files of a pool, one each: the index, extents, numbers, heat."""
