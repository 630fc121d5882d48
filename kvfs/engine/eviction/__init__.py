"""Which blocks go, whether they may, and their end."""
