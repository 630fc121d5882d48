"""A client of Ganesha lists a directory while its names are evicted.

Ganesha looks for each name that it has read, and gives the listing up if one is not there any more
(docs/nfs.md). XFS below the same server breaks off, too; its files are removed, not evicted.
"""

import os
import subprocess
from errno import ESTALE
from pathlib import Path
from typing import Final

import pytest

from tests.support.clients.stepping import until
from tests.support.kernel.calls import tolerated, write_file
from tests.support.mounts.mounting import COMMAND_WAIT_S, KVFS, ROOT, run_kvfs
from tests.support.nfs.pool import nfs_pool

pytestmark = pytest.mark.needs_fuse

COUNT: Final = 2000
#: These stay, among the others.
KEPT: Final = {f"block-{number:05}" for number in range(0, COUNT, 100)}
#: As docs/nfs.md sets it.
SETTINGS: Final = "EXPORT_DEFAULTS { Attr_Expiration_Time = 1; }\n"


@pytest.mark.parametrize("version", [3, 4], ids=["v3", "v4"])
def test_listings_go_on_while_names_are_evicted(tmp_path: Path, version: int) -> None:
    """[life-server-lists] Each has what was there throughout, and none of it twice.

    None ends with NOENT. One ends with STALE if Ganesha's attributes of a row expired before the
    client had it: then Ganesha opens the block, which is gone.
    """
    with nfs_pool(tmp_path, settings=SETTINGS) as pool, pool.client(version) as client:
        directory = pool.path / "listed"
        directory.mkdir()
        for number in range(COUNT):
            write_file(directory / "block.tmp", b"bytes")
            (directory / "block.tmp").rename(directory / f"block-{number:05}")
        run_kvfs("pin", *(str(directory / name) for name in KEPT))
        command = [*KVFS, "evict", str(directory)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as evicting:
            until(lambda: len(os.listdir(directory)) < COUNT, "the eviction begins")
            listings: list[list[str]] = []
            while len(os.listdir(directory)) > len(KEPT):
                with tolerated(ESTALE):
                    listings.append(client.call("listdir", "/listed"))
            assert evicting.wait(COMMAND_WAIT_S) == 0
        for names in listings:
            assert set(names) >= KEPT
            assert len(names) == len(set(names))

        def shows_what_is_left() -> bool:
            with tolerated(ESTALE):  # its attributes of the last that went expire meanwhile
                names = set(client.call("listdir", "/listed"))
                assert names >= KEPT
                return names == KEPT
            return False

        until(shows_what_is_left, "what went is not listed")
