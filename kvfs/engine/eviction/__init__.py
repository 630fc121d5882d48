"""Eviction: which blocks go, whether they may go, and how they are removed."""
