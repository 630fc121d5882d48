"""What the cache did: hits, misses, reuse, and events for listeners."""
