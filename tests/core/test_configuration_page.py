"""docs/configuration.md is what its module makes of the settings, and has each setting once."""

import dataclasses
from typing import Final

import pytest

from kvfs.core.settings import RELOADABLE, Settings
from make.configuration_page import GROUPS, PAGE, page

NAMES: Final = [declared.name for declared in dataclasses.fields(Settings)]


def test_the_page_is_made_from_the_settings() -> None:
    assert PAGE.read_text() == page(), "run `python -m make.configuration_page`"


def test_each_setting_has_words_and_no_words_are_left_over() -> None:
    told = [name for settings in GROUPS.values() for name in settings]
    assert sorted(told) == sorted(NAMES)
    assert all(
        words.meaning and words.change for each in GROUPS.values() for words in each.values()
    )


@pytest.mark.parametrize(
    "row",
    [
        "| `durable_within_s` | 10 s | 0 s to 3600 s |",
        "| `checksum_stop_s` | 2 s | 0 s to 600 s |",
        "| `capacity_bytes` | not set |",
        "| `mode` | not set | 0000 to 1777 |",
        "| `eviction` | lru | `lru`, `arc`, `adaptive`, `gate` |",
        "| `lease_max` | 0.92 | 0 to 1 |",
        "| `room_wait_bytes` | 512 MiB | 1 MiB or more |",
        "| `busy_poll_us` | 40 us | 0 us to 1000 us |",
    ],
)
def test_a_row_has_default_unit_and_values(row: str) -> None:
    assert f"\n{row}" in page()


def test_what_a_reload_applies_is_marked() -> None:
    assert {name for name in NAMES if f"\n| `{name}` (*reload*) |" in page()} == RELOADABLE
