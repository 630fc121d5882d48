"""kvfs: a flash tier for LLM KV cache that is a file system."""

from typing import Final

__version__: Final = "0.1.0"
