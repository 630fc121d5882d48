"""docs/sizing.md: what it computes follows, and what it takes from other pages stands there."""

import re
from typing import Final

import pytest

from tests.support.mounts.mounting import ROOT

PAGE: Final = (ROOT / "docs" / "sizing.md").read_text()
#: The recorded hour: blocks, and the tokens of each.
BLOCKS: Final = 182_790
BLOCK_TOKENS: Final = 512
#: No cache finds more of it, in percent.
BEST: Final = 36.6
TOKEN_BYTES: Final = {"8B": 2 * 32 * 8 * 128 * 2, "70B": 2 * 80 * 8 * 128 * 2}
#: What the page says: the page that measured it, and how that says it.
MEASURED: Final = {
    "| a store of 4 MiB | 461 us |": ("performance.md", "| CPU, store cycle | 461.0 us |"),
    "| loads of 32 MiB | 9.1 ms a GB |": (
        "performance.md",
        "| CPU, load of 32 MiB blocks | 9.1 ms/GB |",
    ),
    "| a warm open and close | 36 us |": (
        "performance.md",
        "| CPU, warm open + close | 35.9 us |",
    ),
    "| some 52 MiB |": ("performance.md", "together hold some 52 MiB, by Pss"),
    "| 6 MiB |": ("performance.md", "supervisor (RssAnon 6 MiB)"),
    "| 32 MiB | 1.0023 |": ("dev/measuring.md", "| 1.0023 / 1.0002 |"),
    "| 64 KiB | 1.06 |": ("dev/measuring.md", "| 64 KiB | 100 | 1.06 |"),
    "| 4 MiB | 1.0007 |": ("dev/measuring.md", "| 4 MiB | 20 | 1.0007 |"),
    "| 56 MB |": ("eviction.md", "a million blocks (RssAnon) | 56 MB"),
    "40 to 80 bytes for each block": ("eviction.md", "40 to 80 bytes a block"),
    "some 550 bytes a name": ("eviction.md", "some 550 bytes of the index's map"),
    "182,790 blocks of 512 tokens": ("eviction.md", "accesses to 182,790 blocks"),
    "more than 36.6 %": ("eviction.md", "at best 36.6 % are hits"),
}


@pytest.mark.parametrize(("said", "where"), MEASURED.items())
def test_a_figure_is_that_of_the_page_that_measured_it(said: str, where: tuple[str, str]) -> None:
    document, measured = where
    assert said in PAGE
    assert measured in (ROOT / "docs" / document).read_text()


def two_digits(value: float) -> str:
    return f"{value:.2g}"


@pytest.mark.parametrize("model", TOKEN_BYTES)
def test_what_a_token_takes_follows_from_the_model(model: str) -> None:
    (row,) = re.findall(rf"^\| Llama 3.1 {model} \|.*$", PAGE, re.MULTILINE)
    token_bytes = TOKEN_BYTES[model]
    assert f"| {token_bytes:,} bytes | {token_bytes * 256 >> 20} MiB | " in row
    assert f"| {two_digits(1e12 / token_bytes / 1e6)} million |" in row


def test_the_sizes_of_a_pool_follow_from_the_trace() -> None:
    rows = re.findall(r"^\| (\d+) % \| ([\d.]+) % \| (\d+) % \| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 4
    eviction = (ROOT / "docs" / "eviction.md").read_text()
    for percent, found, part, sizes in rows:
        assert f"| {percent} % | {found} / " in eviction
        assert round(float(found) / BEST * 100) == int(part)
        asked_bytes = BLOCKS * BLOCK_TOKENS * int(percent) / 100
        wanted = [f"{two_digits(asked_bytes * one / 1e12)} TB" for one in TOKEN_BYTES.values()]
        assert sizes.split(" | ") == wanted


def test_what_a_core_serves_follows_from_its_time() -> None:
    assert "2,100 stores a second: 9.1 GB/s" in PAGE
    assert int(1 / 461e-6 / 100) == 21
    assert two_digits((4 << 20) / 461e-6 / 1e9) == "9.1"
    assert two_digits(1 / 9.1e-3) == "1.1e+02"
    assert two_digits(1 / 36e-6) == "2.8e+04"


def test_how_long_a_drive_lasts_follows_from_its_promise() -> None:
    for writes, total, rate, days in ((1, "7.0 PB", 44, 81), (3, "21 PB", 133, 243)):
        promised_bytes = 3.84e12 * writes * 365 * 5
        (row,) = re.findall(rf"^\|.* \| {total} \|.*$", PAGE, re.MULTILINE)
        assert round(promised_bytes / (5 * 365 * 86_400) / 1e6) == rate
        assert round(promised_bytes / 1e9 / 86_400) == days
        assert f"| {rate} MB/s on average | {days} days |" in row
