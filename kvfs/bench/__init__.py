"""KV-shaped jobs run alternately on a mount and in a plain directory, for `kvfs bench`."""
