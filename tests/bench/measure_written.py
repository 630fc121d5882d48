"""What is written to the device for a byte stored: ``python -m tests.bench.measure_written``.

Run as root. Mounts a new pool on a loop device in memory and stores blocks by O_DIRECT under
temporary names, which are renamed, at a steady rate; waits until all is durable, and counts what
the device was told to write since the mount. Prints JSON. Not collected by pytest.
"""

import argparse
import json
import mmap
import os
import time
from pathlib import Path
from typing import Final

from kvfs.core.sizes import parse_size
from tests.support.mounts.mounting import Mounted, loop_device, run_kvfs, workplace

_SECTOR_BYTES: Final = 512
_DIRECTORIES: Final = 8
_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT


def _written_bytes(device: str) -> int:
    fields = Path(f"/sys/class/block/{Path(device).name}/stat").read_text().split()
    return int(fields[6]) * _SECTOR_BYTES


def _store_all(top: Path, block: mmap.mmap, stores: int, rate: float) -> None:
    for number in range(_DIRECTORIES):
        (top / f"{number}").mkdir()
    begun_s = time.monotonic()
    for number in range(stores):
        path = top / f"{number % _DIRECTORIES}" / f"{number:08}"
        fd = os.open(f"{path}.tmp", _FLAGS, 0o644)
        try:
            os.write(fd, block)
        finally:
            os.close(fd)
        os.rename(f"{path}.tmp", path)
        # A steady rate, as of clients; no test runs this.
        time.sleep(max(0.0, begun_s + number / rate - time.monotonic()))


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block", type=parse_size, default=64 << 10, metavar="SIZE")
    parser.add_argument("--stores", type=int, default=6000)
    parser.add_argument("--rate", type=float, default=100.0, help="stores a second")
    given = parser.parse_args()
    block = mmap.mmap(-1, given.block)
    block.write(os.urandom(given.block))
    stored_bytes = given.stores * given.block
    with (
        loop_device(stored_bytes * 3 // 2 + (512 << 20)) as device,
        workplace("disk") as place,
        Mounted(device, place / "kv") as mount,
    ):
        before = _written_bytes(device)
        _store_all(mount.path, block, given.stores, given.rate)
        run_kvfs("sync", str(mount.path))
        os.sync()
        written_bytes = _written_bytes(device) - before
        found = {
            "block_bytes": given.block,
            "stores": given.stores,
            "rate": given.rate,
            "written_for_a_byte": round(written_bytes / stored_bytes, 4),
            "index_log": mount.status()["index_log"],
        }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
