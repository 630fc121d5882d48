"""A server of some tree that runs under a profiler of ours, for the benchmarks that count."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvfs.bench.self_made import unmount
from tests.bench.measure_commits import kvfs

_START_WAIT_S: Final = 120.0
_LOOK_S: Final = 0.05


@contextlib.contextmanager
def profiled_server(tree: Path, program: str, device: str, place: Path) -> Iterator[Path]:
    """Format *device*, serve it by *tree*'s kvfs inside *program*, and yield a folder for blocks.

    *program* is Python; its arguments are the tree, the file to write what it found to, and those
    of kvfs. It has written *place*/found.json when the block ends. Raises RuntimeError if the
    server does not start.
    """
    kvfs(tree, "mkfs", "--force", device)
    mountpoint, written = place / "kv", place / "found.json"
    mountpoint.mkdir(exist_ok=True)
    interpreter: list[str | Path] = [tree / ".venv/bin/python", "-c", program, tree, written]
    server = subprocess.Popen(
        [*interpreter, "mount", "--foreground", "--data-path=passthrough", device, mountpoint],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stderr=subprocess.DEVNULL,
    )
    try:
        end_s = time.monotonic() + _START_WAIT_S
        while not mountpoint.is_mount():
            if server.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"the server of {tree} does not start")
            time.sleep(_LOOK_S)
        (mountpoint / "blocks").mkdir()
        yield mountpoint / "blocks"
        kvfs(tree, "umount", str(mountpoint))
    finally:
        unmount(str(mountpoint))
        server.wait()
