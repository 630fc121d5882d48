"""docs/comparison.md and docs/faq.md: each figure stands on the page that measured it."""

import re
from typing import Final

import pytest

from kvfs.core import load_needs
from kvfs.core.index_room import ROWS_BYTES
from kvfs.core.settings import Settings
from kvfs.core.sizes import MIB
from tests.support.mounts.mounting import ROOT

COMPARISON: Final = (ROOT / "docs" / "comparison.md").read_text()
FAQ: Final = (ROOT / "docs" / "faq.md").read_text()
PERFORMANCE: Final = (ROOT / "docs" / "performance.md").read_text()
#: A row of the page, and the jobs of the bench whose ratios it has.
ROWS: Final = {
    "loads, buffered": ("load-32m-2t-buffered", "load-4m-2t-buffered"),
    "loads, O_DIRECT": ("load-32m-2t-direct", "load-4m-2t-direct"),
    "stores, buffered": ("store-32m-2t-buffered", "store-4m-2t-buffered"),
    "stores, O_DIRECT": ("store-32m-2t-direct", "store-4m-2t-direct"),
}


def measured_ratio(job: str) -> str:
    """Return the ratio of *job* in the results."""
    results = PERFORMANCE.partition("## Results")[2]
    (row,) = re.findall(rf"^\| {job} \|.*$", results, re.MULTILINE)
    return str(row.split("|")[4].strip())


@pytest.mark.parametrize(("what", "jobs"), ROWS.items())
def test_a_ratio_is_the_measured_one(what: str, jobs: tuple[str, str]) -> None:
    assert f"| {what} | {' | '.join(map(measured_ratio, jobs))} |" in COMPARISON


def test_the_small_stores_are_the_measured_rate() -> None:
    (row,) = re.findall(
        r"^\| store-4m-2t-buffered \| \S+ GB/s \| (\S+) GB/s \| 0.15", PERFORMANCE, re.MULTILINE
    )
    assert f"0.15 is {float(row):.1f} GB/s of blocks of 4 MiB" in COMPARISON


def test_the_full_pool_is_the_measured_one() -> None:
    found = re.findall(r"over XFS with a cleaner: rate ([\d.]+)", PERFORMANCE)
    small, large = found
    assert f"beside XFS with a script | {large} | {small} |" in COMPARISON


def test_what_the_script_refused_is_the_measured_number() -> None:
    for share, refused in (("10 %", "7,575"), ("5 %", "119,593")):
        (row,) = re.findall(
            rf"^\| {share} \| XFS, cleaned every 60 s \|.* ([\d,]+) \|$", PERFORMANCE, re.MULTILINE
        )
        assert row == refused
        assert refused in COMPARISON
    assert re.search(r"^\| 10 % \| kvfs, lru \| 27.6 % .* 0 \|$", PERFORMANCE, re.MULTILINE)
    assert re.search(r"^\| 10 % \| XFS, cleaned every 60 s \| 24.5 % ", PERFORMANCE, re.MULTILINE)
    assert "27.6 % there, XFS 24.5 %" in COMPARISON


def test_the_first_tokens_are_the_measured_ones() -> None:
    (row,) = re.findall(r"^\| 8,192 \| 1 GiB \| 250 .*$", PERFORMANCE, re.MULTILINE)
    assert [cell.split()[0] for cell in row.split("|")[3:9:5]] == ["250", "56"]
    assert "250 ms to compute and 56 ms to" in FAQ
    for page in (COMPARISON, FAQ):
        assert "16,384 tokens on" in page
    assert "At 5 GB/s it wins from 16,384 tokens on. At the 1 to 1.9 GB/s" in PERFORMANCE


def test_the_memory_of_a_block_and_of_a_mount_is_what_the_calculator_takes() -> None:
    assert round(ROWS_BYTES + load_needs.BLOCK_BYTES.value, -2) == 600
    processes = load_needs.SERVER_BYTES.value + load_needs.SUPERVISOR_BYTES.value
    assert f"Some {processes / MIB:.0f} MiB, and some 600 bytes a block" in FAQ


def test_defaults_that_are_named_are_the_defaults() -> None:
    assert Settings().durable_within_s == 10
    assert "in the last ten seconds (`durable_within_s`)" in FAQ
    assert Settings().pin_share == 0.5
    assert "half of the\ncapacity (`pin_share`)" in FAQ
    assert not Settings().metrics_port


def test_links_within_the_page_lead_to_its_headings() -> None:
    headings = {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^## (.*)$", COMPARISON, re.MULTILINE)
    }
    links = set(re.findall(r"\]\(#([^)]+)\)", COMPARISON))
    assert len(links) == 6
    assert links <= headings
