"""What may stay, and for how long: leases, pins, policies and the rank for eviction."""
