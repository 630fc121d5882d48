"""What a budget of writes does on a mount: ``python -m tests.bench.measure_budget``.

Run as root. Mounts a new pool on a loop device in memory, with the gate and room in memory for new
blocks. One client asks for blocks at a steady rate, popular ones by Zipf's law and others once, and
stores what is missing, far more than the budget allows. Prints a line of JSON for each span: what
was found, what was stored, what the device was told to write, and the price. Not collected by
pytest.
"""

import argparse
import itertools
import json
import os
import random
import time
from pathlib import Path
from typing import Any, Final

from kvfs.core.sizes import DAY_S, parse_size
from tests.support.mounts.mounting import Mounted, loop_device, workplace

_SECTOR_BYTES: Final = 512
_POPULAR: Final = 4000
_SEED: Final = 7
#: The share of requests for popular blocks.
_AGAIN: Final = 0.6


def _written_bytes(device: str) -> int:
    fields = Path(f"/sys/class/block/{Path(device).name}/stat").read_text().split()
    return int(fields[6]) * _SECTOR_BYTES


class Client:
    """Asks for blocks of one size below *top*, and stores what is missing."""

    def __init__(self, top: Path, block_bytes: int) -> None:
        self._top, self._data = top, os.urandom(block_bytes)
        self._draw = random.Random(_SEED)
        self._weights = list(itertools.accumulate(1 / (at + 1) for at in range(_POPULAR)))
        self._once = itertools.count(_POPULAR)
        self.asked = self.found = self.stored_bytes = 0

    def ask(self) -> None:
        """Ask for one block."""
        number = next(self._once)
        if self._draw.random() < _AGAIN:
            (number,) = self._draw.choices(range(_POPULAR), cum_weights=self._weights)
        path = self._top / f"{number}"
        self.asked += 1
        try:
            assert path.read_bytes() == self._data
            self.found += 1
        except FileNotFoundError:
            draft = path.with_suffix(".tmp")
            draft.write_bytes(self._data)
            draft.rename(path)
            self.stored_bytes += len(self._data)

    def ask_for(self, seconds: float, rate: float) -> None:
        """Ask so often a second, for so many *seconds*."""
        begun_s = time.monotonic()
        for number in range(int(seconds * rate)):
            self.ask()
            # A steady rate, as of clients; no test runs this.
            time.sleep(max(0.0, begun_s + number / rate - time.monotonic()))

    def counts(self) -> tuple[int, int, int]:
        """Return what was asked for, found and stored (bytes) so far."""
        return self.asked, self.found, self.stored_bytes


def _line(
    before: tuple[int, ...], now: tuple[int, ...], took_s: float, mount: Mounted, budget: int
) -> dict[str, Any]:
    asked, found, stored, written = (b - a for a, b in zip(before, now, strict=True))
    told = mount.status()
    gate = told["gate"]
    return {
        "hit_share": round(found / asked, 3),
        "stored_over_budget": round(stored / took_s * DAY_S / budget, 2),
        "written_over_budget": round(written / took_s * DAY_S / budget, 2),
        "price": round(gate["price"], 3),
        "used_hour": gate["used_hour"],
        "dropped": told["probation"]["dropped"],
        "moved": told["probation"]["moved"],
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block", type=parse_size, default=256 << 10, metavar="SIZE")
    parser.add_argument("--budget", type=parse_size, default=40 << 30, metavar="SIZE")
    parser.add_argument("--rate", type=float, default=60.0, help="requests a second")
    parser.add_argument("--spans", type=int, default=8)
    parser.add_argument("--span-s", type=float, default=30.0)
    given = parser.parse_args()
    settings = {
        "eviction": "gate",
        "probation_bytes": 64 << 20,
        "write_budget_bytes": given.budget,
        "index_preallocate_bytes": "1M",
    }
    flags = [f"--set={name}={value}" for name, value in settings.items()]
    with (
        loop_device(1 << 30) as device,
        workplace("disk") as place,
        Mounted(device, place / "kv", "--capacity=256M", *flags) as mount,
    ):
        client = Client(mount.path, given.block)
        before = (*client.counts(), _written_bytes(device))
        for _ in range(given.spans):
            begun_s = time.monotonic()
            client.ask_for(given.span_s, given.rate)
            now = (*client.counts(), _written_bytes(device))
            line = _line(before, now, time.monotonic() - begun_s, mount, given.budget)
            print(json.dumps(line), flush=True)
            before = now


if __name__ == "__main__":
    main()
