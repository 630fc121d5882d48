"""The names and stamps of blocks: what a connector would call them, known again by number. Pure."""

import hashlib


def block_name(salt: str, number: int) -> bytes:
    """Return a name as LMCache makes them: model, world, rank and a hash of the block's tokens."""
    digest = hashlib.sha256(f"{salt}/{number}".encode()).hexdigest()
    return f"meta-llama--Llama-3.1-8B-Instruct@1@0@{digest}.data".encode()


def temporary_name(name: bytes) -> bytes:
    """Return the name a block is written under before its rename."""
    return name + b".tmp"


def block_stamp(name: bytes) -> bytes:
    """Return the 8 bytes at the head and the tail of the block *name*, so that a load can tell."""
    return hashlib.sha256(name).digest()[:8]
