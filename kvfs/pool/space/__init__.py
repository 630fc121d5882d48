"""How much of the pool is taken, and what is on its way out of it."""
