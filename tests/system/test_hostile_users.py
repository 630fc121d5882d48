"""Users who take all they can get, in every way and in random order, beside one who works.

Two are users of their own; the third is a crowd of rootless containers, with a uid each. Whatever
they do, the honest one's stores succeed, what it stored last is there and whole, and the server
goes on.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.clients.callers import Caller
from tests.support.forks.process import Process
from tests.support.mounts.bounded_pool import BLOCK_BYTES, CREATE, HONEST, HOSTILE, bounded_pool
from tests.support.mounts.mounting import ROOT, Mounted

pytestmark = [pytest.mark.needs_fuse, pytest.mark.usefixtures("kvfs_only")]

#: The owner of a range, and whom its containers run as.
OWNER: Final = HOSTILE + 7
CROWD: Final = (200_000, 200_001, 200_002)
#: A third of the honest one's share: of so small a pool a sixth is headroom, extents made ahead and
#: pins.
KEPT: Final = 8
#: Pins have a bound of their own, for all together; leases have none that is hard, and are turned
#: off where users do not trust each other (docs/tenants.md).
BOUNDS: Final = ("--set", "pin_share=0.05")
#: On passthrough a draft takes what it can get before a look finds it, and gives it back then.
HIT_RATES: Final = {"daemon": 0.75, "passthrough": 0.5}
#: Every hostile one was refused something in so many acts, or the load is none.
REFUSED: Final = ("EDQUOT", "EMFILE", "ENOSPC")
PROOF_S: Final = 300.0


@contextlib.contextmanager
def hostile_users(folder: Path, seed: int) -> Iterator[list[dict[str, int]]]:
    """Let them act during the block; what each did is in the list afterwards."""
    found: list[dict[str, int]] = []
    module = [sys.executable, "-m", "tests.support.clients.hostile_user", str(folder)]
    with contextlib.ExitStack() as stack:
        users = []
        for uid in (HOSTILE, HOSTILE + 1, *CROWD):
            command = [*module, str(uid), str(seed)]
            pipe = subprocess.PIPE
            users.append(Process(command, cwd=ROOT, stdin=pipe, stdout=pipe))
            stack.enter_context(users[-1])
            stack.callback(users[-1].kill)
        yield found
        for user in users:
            out, _ = user.communicate()
            assert user.returncode == 0
            found.append(json.loads(out))


class HonestUser:
    """Stores blocks as connectors do, and loads what it stored last."""

    def __init__(self, caller: Caller, folder: Path) -> None:
        self._caller, self._folder = caller, folder
        self._kept: deque[tuple[str, bytes]] = deque(maxlen=KEPT)
        self.stored = self.hits = self.misses = 0
        self.took_s: list[float] = []
        # What nobody has stored lately is lent, and what is held does not come back at once.
        for _ in range(KEPT):
            self.store()

    def store(self) -> None:
        """Store one more."""
        path, data = str(self._folder / f"honest{self.stored}"), os.urandom(BLOCK_BYTES)
        began_s = time.perf_counter()
        fd = self._caller.os("open", f"{path}.tmp", CREATE, 0o644)
        assert self._caller.os("write", fd, data) == BLOCK_BYTES
        self._caller.os("close", fd)
        self._caller.os("rename", f"{path}.tmp", path)
        self.took_s.append(time.perf_counter() - began_s)
        self._kept.append((path, data))
        self.stored += 1

    def load_all(self) -> None:
        """Load all that it counts on; what is there is whole."""
        for path, data in self._kept:
            try:
                fd = self._caller.os("open", path, os.O_RDONLY)
            except FileNotFoundError:
                self.misses += 1
                continue
            self.hits += 1
            assert self._caller.os("read", fd, 2 * BLOCK_BYTES) == data
            self._caller.os("close", fd)

    def work(self, seconds: float) -> None:
        """Store and load for so long."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self.store()
            self.load_all()


def p99_s(took_s: list[float]) -> float:
    """Return what one in a hundred took longer than."""
    return sorted(took_s)[len(took_s) * 99 // 100]


def hold_out(pool: Mounted, elsewhere: Mounted, seconds: float, seed: int) -> None:
    """Let the honest one work beside them on *pool*, and before that with them *elsewhere*."""
    with Caller(HONEST, HONEST) as caller:
        alone = HonestUser(caller, pool.path)
        with hostile_users(elsewhere.path, seed):
            alone.work(seconds / 2)
        beside = HonestUser(caller, pool.path)
        with hostile_users(pool.path, seed) as found:
            beside.work(seconds)
    print(
        json.dumps(
            {
                "data_path": pool.status()["data_path"],
                "stores": beside.stored,
                "hits": beside.hits,
                "misses": beside.misses,
                "p99_ms": round(1000 * p99_s(beside.took_s), 1),
                "p99_with_them_elsewhere_ms": round(1000 * p99_s(alone.took_s), 1),
                "hostile": found,
            }
        )
    )
    hit_rate = beside.hits / (beside.hits + beside.misses)
    assert hit_rate >= HIT_RATES[pool.status()["data_path"]], found
    refused = {how.split()[1] for done in found for how in done} - {"done"}
    assert refused & set(REFUSED), found


@pytest.mark.parametrize("data_path", ["daemon", "passthrough"])
def test_a_few_seconds(data_path: str, tmp_path: Path) -> None:
    """[held-shares] Nothing of the honest one's is refused or gone."""
    run(data_path, tmp_path, 6.0)


@pytest.mark.proof
@pytest.mark.parametrize("data_path", ["daemon", "passthrough"])
def test_five_minutes(data_path: str, tmp_path: Path) -> None:
    """[held-shares] The same, for long enough that all of it coincides with all."""
    run(data_path, tmp_path, PROOF_S)


def run(data_path: str, place: Path, seconds: float) -> None:
    """Make both pools, and hold out."""
    subuid = place / "subuid"
    subuid.write_text(f"{OWNER}:{CROWD[0]}:65536\n")
    flags = (*BOUNDS, "--set", f"subuid_file={subuid}")
    with bounded_pool(data_path, *flags) as pool, bounded_pool(data_path, *flags) as elsewhere:
        for mounted in (pool, elsewhere):
            os.setxattr(mounted.path, b"user.kvfs.lease", b"none")
        hold_out(pool, elsewhere, seconds, seed=os.getpid())
