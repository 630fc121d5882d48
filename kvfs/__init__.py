"""kvfs: a flash tier for LLM KV cache that is a file system."""

# It is the first that each command loads, and typing would be a third of its start.
__version__ = "0.1.0"
