"""KV-shaped jobs run on a mount and on a plain directory in turns, for `kvfs bench`."""
