"""How long requests take: a sample of each kind, whichever way the answer comes."""

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from mount.fuse.channel import TIMED_OF, RequestTimes
from tests.support.mounts.mounting import Mounted

pytestmark = pytest.mark.needs_fuse


def ticking() -> Iterator[int]:
    return count(0, 1000)


def test_a_request_is_timed_from_its_begin_to_its_end() -> None:
    clock = ticking()
    times = RequestTimes(lambda: next(clock))
    times.begin(8, 1)
    times.begin(10, 1)
    times.end(8)
    times.end(9)  # not timed
    assert times.running.keys() == {10}
    assert times.by_code[1].total_ns == 2000


def test_requests_without_an_answer_are_bounded() -> None:
    times = RequestTimes()
    for unique in range(5000):
        times.begin(unique, 1)
    assert len(times.running) == 1024


def test_requests_of_each_way_are_timed(mount: Mounted, kv: Path, kvfs_only: None) -> None:
    """LOOKUP on the fast path, MKDIR by libfuse, STATFS by neither."""
    before = mount.status()["request_times"]
    for number in range(3 * TIMED_OF):
        assert not (kv / f"{number}").exists()
        (kv / f"{number}").mkdir()
        os.statvfs(kv)
    times = mount.status()["request_times"]
    for kind in ("LOOKUP", "MKDIR", "STATFS"):
        gained = times[kind]["count"] - before.get(kind, {"count": 0})["count"]
        assert gained >= 2, kind
        assert 0 < times[kind]["p50_s"] < times[kind]["total_s"] + 1


def test_a_store_is_timed_from_its_create(mount: Mounted, kv: Path, kvfs_only: None) -> None:
    before = mount.status()["store_times"]
    (kv / "a.tmp").write_bytes(b"x")
    (kv / "a.tmp").rename(kv / "a.data")
    (kv / "b.data").write_bytes(b"x")
    with (kv / "a.data").open("r+b") as rewritten:
        rewritten.write(b"y")
    after = mount.status()["store_times"]
    assert after["count"] == before["count"] + 2
    assert after["total_s"] > before["total_s"]
    assert after["recent"]["count"] >= 2
