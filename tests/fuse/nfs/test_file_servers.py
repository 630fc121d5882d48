"""What an NFS server leaves open: a program of that name stands for it, as for Ganesha."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.clients.stamped import state
from tests.support.mounts.mounting import Mounted, run_kvfs
from tests.support.mounts.places import blank_place, small_mount

pytestmark = pytest.mark.needs_fuse

SERVER: Final = "a-file-server"
#: Stores a block and goes on having it open: Ganesha creates what it opens; nfsd makes a node,
#: which it opens to write.
STORE: Final = """
import os, sys
made, name = sys.argv[1:]
flags = os.O_WRONLY
if made == "node":
    os.mknod(name + ".tmp", 0o644)
else:
    flags |= os.O_CREAT | os.O_EXCL
fd = os.open(name + ".tmp", flags)
os.write(fd, bytes(65536))
os.rename(name + ".tmp", name)
print("renamed", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module", params=["daemon", "passthrough"])
def mounted(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    flags = (f"--data-path={request.param}", "--set", f"file_servers={SERVER}")
    with blank_place() as place, small_mount(place, *flags) as made:
        yield made


@pytest.mark.parametrize("made", ["file", "node"])
def test_what_a_server_renamed_may_go_although_it_has_it_open(
    mounted: Mounted, tmp_path: Path, made: str
) -> None:
    """[life-server] Published at once, and no reader that keeps eviction away."""
    program, name = tmp_path / SERVER, mounted.path / f"block-{made}"
    shutil.copy(os.path.realpath(sys.executable), program)
    with subprocess.Popen(
        [program, "-S", "-c", STORE, made, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONHOME": sys.base_prefix},
    ) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"renamed\n"
            assert state(name) == "published"
            held = mounted.status()["open_by"]["file_servers"]
            assert held == {"files": 1, "bytes": 65536}
            run_kvfs("evict", str(name))
            assert not name.exists()
        finally:
            server.kill()
