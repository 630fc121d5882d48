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
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

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
#: A thread that a busy machine does not run for seconds is no drive that is silent.
BOUNDS: Final = ("--set", "pin_share=0.05", "--set", "device_silent_s=60")
#: On passthrough a draft takes what it can get before a look finds it, and gives it back then.
HIT_RATES: Final = {"daemon": 0.75, "passthrough": 0.5}
#: Every hostile one was refused something in so many acts, or the load is none.
REFUSED: Final = ("EDQUOT", "EMFILE", "ENOSPC")
PROOF_S: Final = 300.0
#: In the proof they are beside the honest one and elsewhere in turns, so that both meet what else
#: the machine does. His stores may be so many times slower beside them.
PROOF_TURNS: Final = 10
SLOWER_MAX: Final = 3.0


@contextlib.contextmanager
def hostile_users(folder: Path, turn: int) -> Iterator[list[dict[str, int]]]:
    """Let them act during the block; what each did is in the list afterwards."""
    seed = f"{os.getpid()}-{turn}"
    found: list[dict[str, int]] = []
    module = [sys.executable, "-m", "tests.support.clients.hostile_user", str(folder)]
    with contextlib.ExitStack() as stack:
        users = []
        for uid in (HOSTILE, HOSTILE + 1, *CROWD):
            command = [*module, str(uid), seed]
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
        # What nobody has stored lately is lent, and what is held does not come back at once.
        for _ in range(KEPT):
            self.store()

    def store(self) -> float:
        """Store one more, and return how long it took (s)."""
        path, data = str(self._folder / f"honest{self.stored}"), os.urandom(BLOCK_BYTES)
        began_s = time.perf_counter()
        fd = self._caller.os("open", f"{path}.tmp", CREATE, 0o644)
        assert self._caller.os("write", fd, data) == BLOCK_BYTES
        self._caller.os("close", fd)
        self._caller.os("rename", f"{path}.tmp", path)
        took_s = time.perf_counter() - began_s
        self._kept.append((path, data))
        self.stored += 1
        return took_s

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

    def work(self, seconds: float) -> list[float]:
        """Store and load for so long, and return how long each store took (s)."""
        end_s, took_s = time.monotonic() + seconds, []
        while time.monotonic() < end_s:
            took_s.append(self.store())
            self.load_all()
        return took_s


def p99_s(took_s: list[float]) -> float:
    """Return what one in a hundred took longer than."""
    return sorted(took_s)[len(took_s) * 99 // 100]


class HeldOut(NamedTuple):
    """What the honest one found beside them, and what they did, by act and errno."""

    stores: int
    hits: int
    misses: int
    p99_s: float
    p99_elsewhere_s: float
    did: Counter[str]

    def told(self) -> dict[str, object]:
        """Return it as figures to print."""
        return {
            "stores": self.stores,
            "hits": self.hits,
            "misses": self.misses,
            "p99_ms": round(1000 * self.p99_s, 1),
            "p99_with_them_elsewhere_ms": round(1000 * self.p99_elsewhere_s, 1),
            "hostile": dict(sorted(self.did.items())),
        }


def hold_out(pool: Mounted, elsewhere: Mounted, seconds: float, turns: int) -> HeldOut:
    """Let the honest one work beside them on *pool*, and in turns with them *elsewhere*."""
    alone_s: list[float] = []
    beside_s: list[float] = []
    hits = misses = 0
    did: Counter[str] = Counter()
    with Caller(HONEST, HONEST) as caller:
        honest = HonestUser(caller, pool.path)
        for turn in range(turns):
            with hostile_users(elsewhere.path, turn):
                alone_s += honest.work(seconds / 2 / turns)
            honest.hits = honest.misses = 0
            with hostile_users(pool.path, turn) as found:
                beside_s += honest.work(seconds / turns)
            hits, misses = hits + honest.hits, misses + honest.misses
            for done in found:
                did.update(done)
    held = HeldOut(len(beside_s), hits, misses, p99_s(beside_s), p99_s(alone_s), did)
    print(json.dumps({"data_path": pool.status()["data_path"], **held.told()}))
    assert hits / (hits + misses) >= HIT_RATES[pool.status()["data_path"]], did
    return held


@pytest.mark.parametrize("data_path", ["daemon", "passthrough"])
def test_a_few_seconds(data_path: str, tmp_path: Path) -> None:
    """[held-shares] Nothing of the honest one's is refused or gone."""
    run(data_path, tmp_path, 6.0, 1)


@pytest.mark.proof
@pytest.mark.parametrize("data_path", ["daemon", "passthrough"])
def test_five_minutes(data_path: str, tmp_path: Path) -> None:
    """[held-shares] The same, for long enough that all of it coincides with all."""
    held = run(data_path, tmp_path, PROOF_S, PROOF_TURNS)
    assert {how.split()[1] for how in held.did} & set(REFUSED), held.did
    assert held.p99_s <= SLOWER_MAX * held.p99_elsewhere_s


def run(data_path: str, place: Path, seconds: float, turns: int) -> HeldOut:
    """Make both pools, and hold out."""
    subuid = place / "subuid"
    subuid.write_text(f"{OWNER}:{CROWD[0]}:65536\n")
    flags = (*BOUNDS, "--set", f"subuid_file={subuid}")
    with bounded_pool(data_path, *flags) as pool, bounded_pool(data_path, *flags) as elsewhere:
        for mounted in (pool, elsewhere):
            os.setxattr(mounted.path, b"user.kvfs.lease", b"none")
        return hold_out(pool, elsewhere, seconds, turns)
