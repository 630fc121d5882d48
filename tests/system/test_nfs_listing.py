"""A client of Ganesha lists a directory while its names are evicted.

Ganesha looks for each name that it has read, and gives the listing up if one is not there any more
(docs/nfs.md). XFS below the same server breaks off, too; its files are removed, not evicted.
"""

import os
import subprocess
from errno import ENOENT, ESTALE
from pathlib import Path
from typing import Final

import pytest

from tests.support.clients.stepping import until
from tests.support.kernel.calls import write_file
from tests.support.mounts.mounting import COMMAND_WAIT_S, KVFS, ROOT, run_kvfs
from tests.support.nfs.client import NfsClient
from tests.support.nfs.pool import nfs_pool

pytestmark = pytest.mark.needs_fuse

COUNT: Final = 2000
#: These stay, among the others.
KEPT: Final = {f"block-{number:05}" for number in range(0, COUNT, 100)}
#: As docs/nfs.md sets it.
SETTINGS: Final = "EXPORT_DEFAULTS { Attr_Expiration_Time = 1; }\n"


class Listings:
    """What a client lists, which lists again after each error that docs/nfs.md names."""

    def __init__(self, client: NfsClient) -> None:
        self._client = client
        self._after_stale = False

    def names(self) -> list[str] | None:
        """Return the names of one listing, None if it broke off.

        With STALE Ganesha forgets that block, and until it reads the rows again it looks the name
        up: NOENT.
        """
        try:
            names: list[str] = self._client.call("listdir", "/listed")
        except OSError as error:
            if error.errno != ESTALE and not (self._after_stale and error.errno == ENOENT):
                raise
            self._after_stale = True
            return None
        self._after_stale = False
        return names


@pytest.mark.parametrize("version", [3, 4], ids=["v3", "v4"])
def test_listings_go_on_while_names_are_evicted(tmp_path: Path, version: int) -> None:
    """[life-server-lists] Each has what was there throughout, and none of it twice.

    None ends with NOENT, unless the one before it broke off. One ends with STALE if Ganesha's
    attributes of a row expired before the client had it: then Ganesha opens the block, which is
    gone.
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
            listings, shown = Listings(client), []
            while len(os.listdir(directory)) > len(KEPT):
                if (names := listings.names()) is not None:
                    shown.append(names)
            assert evicting.wait(COMMAND_WAIT_S) == 0
        for names in shown:
            assert set(names) >= KEPT
            assert len(names) == len(set(names))

        def shows_what_is_left() -> bool:
            names = listings.names()
            assert names is None or set(names) >= KEPT
            return names is not None and set(names) == KEPT

        until(shows_what_is_left, "what went is not listed")
