"""measure_load_parts on real mounts: every way on every place, each time accounted for."""

from pathlib import Path
from typing import Final

import pytest

from tests.bench.measure_load_parts import PLACES, WAYS, XFS
from tests.support.clients.small_bench import report_of
from tests.support.kernel.uring import is_disabled
from tests.support.mounts.mounting import kernel_has_passthrough, why_no_mounts

MIB: Final = 1 << 20
#: As rounded to tenths of a microsecond, three times.
_ROUNDED_S: Final = 1e-6


@pytest.mark.needs_fuse
@pytest.mark.needs_loop
@pytest.mark.drops_caches
@pytest.mark.skipif(is_disabled(), reason="kernel.io_uring_disabled")
@pytest.mark.skipif(why_no_mounts() is not None, reason=str(why_no_mounts()))
def test_a_load_is_divided_by_what_the_kernel_counts(tmp_path: Path) -> None:
    paths = ("passthrough", "daemon") if kernel_has_passthrough() else ("daemon",)
    places = [name for name, path in PLACES.items() if name == XFS or path in paths]
    flags = [
        "--data-paths",
        ",".join(paths),
        "--sizes",
        "1M",
        "--blocks",
        "2",
        "--rounds",
        "1",
        "--device-size",
        "320M",
    ]
    report, table = report_of("measure_load_parts", tmp_path, *flags)
    assert report["copy_s"]["1 MiB"] > 0
    assert [(row["place"], row["way"], row["cache"]) for row in report["rows"]] == [
        (place, way.name, "warm" if way.warm else "cold") for place in places for way in WAYS
    ]
    for row in report["rows"]:
        assert (row["bytes"], row["loads"]) == (MIB, 2)
        parts_s = row["client_s"] + row["queued_s"] + row["waits_s"]
        assert row["client_s"] > 0
        assert parts_s >= row["wall_s"] - _ROUNDED_S
        assert (row["server_s"] == 0) == (row["place"] == XFS)
        assert row["calls"] == (4 if row["way"] == "mapped" else 3)
    assert "One load" in table
    assert list(tmp_path.iterdir()) == []
