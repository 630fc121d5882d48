"""LMCache's multi-process mode as docs/connectors/lmcache.md tells it: the server, its client.

Both command lines are the document's, and what it says of what they print is what they print.
`lmcache bench server --mode cpu` takes a block the whole way, from an engine's memory through the
server's into L2 and back, and compares checksums. It wants no GPU and no vLLM.
"""

import re
from pathlib import Path
from typing import ClassVar

import pytest

from tests.connectors.lmcache_server import CHUNK_BYTES, CHUNKS_EACH, REQUESTS, client, server
from tests.support.mounts.mounting import Mounted, Reference

pytestmark = pytest.mark.connectors


def test_readmes_server_serves(connectors_python: Path, tmp_path: Path) -> None:
    """As it stands there: a flag that the pinned version wants and it lacks ends it at once."""
    with server(connectors_python, tmp_path / "l2", "README.md"):
        assert (tmp_path / "l2").is_dir()


class TestServer:
    """One mount, on which everything is restarted."""

    data_path: ClassVar[str] = "auto"

    def test_blocks_survive_the_server_and_the_mount(
        self, connectors_python: Path, mount: Mounted | Reference, kv_dir: Path
    ) -> None:
        """Stored and checked by LMCache itself; after both restarted all of it is there."""
        blocks = kv_dir / "lmcache"  # LMCache makes it
        with server(connectors_python, blocks) as flags:
            printed = client(connectors_python, flags)
        assert printed.count("CHECKSUM MATCH OK") == REQUESTS, printed
        sizes = [path.stat().st_size for path in blocks.iterdir()]
        assert sizes == [CHUNK_BYTES] * (REQUESTS * CHUNKS_EACH)
        mount.remount()
        with server(connectors_python, blocks) as flags:
            again = client(connectors_python, flags)
        hits = re.findall(r"seq \d+/cold\] LOOKUP: (\d+)/(\d+) chunks hit", again)
        assert hits == [(str(CHUNKS_EACH), str(CHUNKS_EACH))] * REQUESTS, again
        checksums = r"seq (\d+)/warm\] CHECKSUM: ([0-9a-f]+)"
        assert re.findall(checksums, again) == re.findall(checksums, printed)
        assert re.findall(checksums, again)
