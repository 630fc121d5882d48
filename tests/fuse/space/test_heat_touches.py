"""What a client does to a block keeps it: its touches are in the heat when the server is gone."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from kvfs.storage.heat_file import HeatFile
from kvfs.storage.syscalls import Syscalls
from tests.support.kernel.calls import read_file, write_file
from tests.support.kernel.message_counts import mounted_with

pytestmark = pytest.mark.needs_fuse


def _tell_warm(path: Path) -> None:
    """llm-d's way: the access time alone."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns + 1, status.st_mtime_ns))


USES: Final[dict[str, Callable[[Path], object]]] = {
    "looked-up": os.stat,
    "loaded": read_file,
    "touched": os.utime,
    "told-warm": _tell_warm,
}


@pytest.mark.parametrize(
    "lanes",
    [{}, {"compiled_reader": False}, {"fast_lane": False}],
    ids=["compiled", "lane", "handlers"],
)
def test_every_use_is_a_touch(lanes: dict[str, bool]) -> None:
    """The kernel keeps no names here: one that it knows it does not ask for."""
    settings = {**lanes, "entry_timeout_s": 0, "attr_timeout_s": 0}
    with mounted_with(settings) as mount:
        numbers = {}
        for name in (*USES, "left-alone", "stored-last"):
            write_file(mount.path / "draft.tmp", name.encode())
            os.rename(mount.path / "draft.tmp", mount.path / name)
            numbers[name] = (mount.path / name).stat().st_ino
        for name, use in USES.items():
            use(mount.path / name)
        mount.stop()

        pool = Path(mount.source)
        epoch = json.loads((pool / "POOL").read_text())["epoch"]
        pool_fd = os.open(pool, os.O_RDONLY | os.O_DIRECTORY)
        try:
            saved = HeatFile(pool_fd, Syscalls(), epoch).read()
        finally:
            os.close(pool_fd)
        assert saved is not None
        rows = saved.rows
        newest_first = list(zip(rows.ino.tolist(), rows.touched.tolist(), strict=True))
        stamps = dict(reversed(newest_first))
        by_name = {name: stamps[ino] for name, ino in numbers.items()}
        assert all(by_name[name] > by_name["stored-last"] for name in USES)
        assert by_name["left-alone"] < by_name["stored-last"]
        assert sorted(USES, key=by_name.__getitem__) == list(USES)
        mount.start()
