"""Counts as people write them: ``1 block``, ``12,000 blocks``."""


def count_of(count: int, one: str, many: str = "") -> str:
    """Return *count* with its noun; *many* is the plural where that is not *one* and an s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
