"""Counts with their nouns."""

import pytest

from kvfs.core.sizes import count_of


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 blocks"), (1, "1 block"), (2, "2 blocks"), (12000, "12,000 blocks")]
)
def test_a_count_has_its_noun(count: int, text: str) -> None:
    assert count_of(count, "block") == text


def test_a_plural_of_its_own() -> None:
    assert count_of(1, "directory", "directories") == "1 directory"
    assert count_of(3, "directory", "directories") == "3 directories"
