"""measure_full on real mounts: it measures a pool that evicts, and leaves nothing behind."""

import time
from pathlib import Path

import pytest

from tests.support.clients.small_bench import report_of
from tests.support.mounts.mounting import why_no_mounts


@pytest.mark.needs_fuse
@pytest.mark.needs_loop
@pytest.mark.skipif(why_no_mounts() is not None, reason=str(why_no_mounts()))
def test_a_full_pool_takes_every_store(tmp_path: Path) -> None:
    flags = ("--device-size", "512M", "--rounds", "1")
    report, table = report_of("measure_full", tmp_path, *flags)
    assert report["refused"]["kvfs, full"] == 0
    assert [len(rounds) for rounds in report["sides"].values()] == [1, 1, 1]
    assert report["full_to_empty_rate"] > 0 < report["full_to_xfs_p99"]
    assert "full over emptied" in table
    assert list(tmp_path.iterdir()) == []
    give_up_s = time.monotonic() + 5
    while str(tmp_path) in Path("/proc/self/mounts").read_text():
        assert time.monotonic() < give_up_s, "a mount stayed"
