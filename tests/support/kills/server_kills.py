"""Clients at work on one mount while its server is killed again and again, and none notices.

Of the kills some fall inside a create, a rename or a release, some into the start of the server
that takes over, and the others at any moment.
"""

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from time import monotonic
from typing import Any, Final, NamedTuple

import pytest

from tests.support.clients.stepping import until
from tests.support.kills.kill_order import KINDS as ORDERS
from tests.support.kills.kill_order import MOMENTS, KillOrder
from tests.support.kills.soak.blocks import Blocks, read_all
from tests.support.kills.soak.soak import Driver, Soak, source_of
from tests.support.kills.soak.table import ABSENT, Row, Table, path_of
from tests.support.kills.steady_client import KINDS
from tests.support.kills.steady_locks import Locks
from tests.support.mounts.mounting import kernel_has_passthrough, run_kvfs, workplace
from tests.support.mounts.supervised import Supervised, children_of, templates_of

#: Every kind once, and two that take turns with locks.
CLIENTS: Final = (*sorted(KINDS), "locks")
#: Enough to notice whatever goes wrong with all of them.
FEW_CLIENTS: Final = ("in_place", "logs", "looks", "mapped", "renames")
#: Of ten kills, so many fall inside a request, and so many into a take-over.
_INSIDE, _TWICE = 4, 1
_ORDER_WAIT_S: Final = 1.0
_CHILD_WAIT_S: Final = 10.0
#: About as long as a server takes to its first answer while the clients keep the machine busy.
_START_S: Final = 0.2


class Kill(NamedTuple):
    """One kill: what it hit, when it was, and when a status told of the next server."""

    how: str
    at_s: float
    served_s: float


class KillDriver(Driver):
    """Starts the clients, and kills servers under them."""

    client_module = "tests.support.kills.steady_client"
    mounted: Supervised

    def __init__(
        self,
        soak: Soak,
        mounted: Supervised,
        table: Table,
        place: Path,
        order: KillOrder,
        kinds: Sequence[str],
        pause_s: float,
    ) -> None:
        super().__init__(soak, mounted, table, place)
        self._order, self._kinds, self._pause_s = order, kinds, pause_s
        self.kills: list[Kill] = []

    def begin(self, table_file: Path) -> None:
        Locks.make(self.place / "lock-owners", self.mounted.path / "locks")
        super().begin(table_file)

    def arguments(self, client: int) -> list[str]:
        return [
            *super().arguments(client),
            *(f"--kind={self._kinds[client]}", f"--locks={self.place / 'lock-owners'}"),
            f"--pause-s={self._pause_s}",
        ]

    def next_kill(self) -> None:
        """Kill the server in one of the ways, and wait until the next one serves."""
        drawn = self.random.randrange(10)
        at_s = monotonic()
        if drawn < _INSIDE:
            how = self._kill_inside()
        elif drawn < _INSIDE + _TWICE:
            how = self._kill_twice()
        else:
            how = "any moment"
            self.mounted.kill_server()
        self.mounted.follow(self.look)
        self.kills.append(Kill(how, at_s, monotonic()))
        self.counts[how] += 1

    def upgrade(self) -> CompletedProcess[str]:
        """Run the command that puts a server of the installed version in this one's place."""
        at_s = monotonic()
        done = run_kvfs("upgrade", str(self.mounted.path), prefix=self.mounted.prefix, check=False)
        self.look()
        if done.returncode == 0:
            self.mounted.follow(self.look)
            self.kills.append(Kill("upgrade", at_s, monotonic()))
            self.counts["upgrade"] += 1
        return done

    def _kill_inside(self) -> str:
        kind, moment = self.random.choice(sorted(ORDERS)), self.random.choice(sorted(MOMENTS))
        self._order.give(kind, moment)
        ended = self.mounted.server_ends(_ORDER_WAIT_S)
        if self._order.take_back():
            return f"{kind}: {moment}"
        assert not ended, self.told()
        self.mounted.kill_server()
        return "any moment"

    def _kill_twice(self) -> str:
        """Kill the server, and the next one while it starts; half of the times its template, too.

        That has another one begin, which imports everything.
        """
        supervisor, before = self.mounted.supervisor_pid, self.mounted.server_pid
        templates = templates_of(supervisor)
        self.mounted.kill_server()

        def starts() -> bool:
            return any(pid not in (before, *templates) for pid in children_of(supervisor))

        until(starts, "the next server starts", _CHILD_WAIT_S, pause_s=0.002)
        self.pause.wait(self.random.uniform(0, _START_S))
        with_template = self.random.random() < 0.5
        for pid in children_of(supervisor):
            if with_template or pid not in templates:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return "in a take-over, and its template" if with_template else "in a take-over"

    def finish(self) -> None:
        """Let the clients come to their end, and add up what they counted."""
        self.watch(self.soak.least_s)
        self.counted = self.end()

    def pauses_s(self) -> list[float]:
        """Return for each kill the longest call that any client made across it."""
        long = [call for client in self.counted for call in client["long"]]
        return [
            max(
                (ended - began for began, ended, _ in long if ended > at and began < served),
                default=0.0,
            )
            for _, at, served in self.kills
        ]

    def report(self) -> dict[str, Any]:
        """Return the figures, JSON-ready."""
        total: Counter[str] = Counter()
        for client in self.counted:
            total.update({k: n for k, n in client.items() if isinstance(n, int)})
        pauses = sorted(self.pauses_s())
        figures: dict[str, Any] = {
            "data_path": self.soak.path,
            "full": self.soak.full,
            "source": "drive" if self.soak.drive else "directory",
            "seed": self.soak.seed,
            "clients": len(self._kinds),
            "kills": len(self.kills),
            "hit": dict(sorted(self.counts.items())),
            "failed": 0,
            "wrong": 0,
            "lost": 0,
            "done": dict(sorted(total.items())),
        }
        if pauses:
            figures["pause_s"] = {
                "median": round(pauses[len(pauses) // 2], 3),
                "p99": round(pauses[int(len(pauses) * 0.99)], 3),
                "most": round(pauses[-1], 3),
                "above_1_s": sum(pause > 1.0 for pause in pauses),
            }
        return figures


def load_of(
    path: str,
    room: str,
    source: str,
    *,
    most_s: float,
    kinds: Sequence[str] = CLIENTS,
) -> Soak:
    """Return the load of such clients; between two kills there is 0.1 s at least and *most_s*.

    ``KVFS_KILLS_SEED`` is what the kills and the clients' choices follow from.
    """
    seed = int(os.environ.get("KVFS_KILLS_SEED", "1"))
    return Soak(path, room == "full", source == "drive", 0, seed, 0.1, most_s, clients=len(kinds))


@contextlib.contextmanager
def steady_load(
    soak: Soak,
    kinds: Sequence[str] = CLIENTS,
    *,
    pause_s: float = 0.03,
    installed: Path | None = None,
    flags: Sequence[str] = (),
) -> Iterator[KillDriver]:
    """Yield clients of these *kinds* at work; at the end nothing may be lost, wrong or broken.

    Each client pauses for *pause_s* on average between two things that it does. The server is that
    of the kvfs that lies in *installed*, mounted with *flags*. Raises AssertionError with the first
    fault.
    """
    with workplace() as place, source_of(soak) as source, KillOrder(place / "order") as order:
        table_file = place / "table"
        table = Table.make(table_file, soak.names)
        own = (f"--capacity={soak.capacity_bytes}", f"--data-path={soak.path}")
        mounted = Supervised(source, place / "kv", *own, *flags, prefix=order.prefix(installed))
        try:
            with mounted:
                assert mounted.status()["data_path"] == soak.path
                driver = KillDriver(soak, mounted, table, place, order, kinds, pause_s)
                try:
                    driver.begin(table_file)
                    yield driver
                    driver.finish()
                finally:
                    driver.kill()
                until(lambda: mounted.status()["open_handles"] == 0, "no handle is left")
                mounted.stop()
                found = run_kvfs("fsck", source, check=False)
                assert found.returncode == 0, f"{soak}: {found.stdout}{found.stderr}"
                assert mounted.errors() == [], f"{soak}: {mounted.errors()}"
                mounted.start()
                _check(mounted, table, soak)
        finally:
            table.close()


def _check(mounted: Supervised, table: Table, soak: Soak) -> None:
    """Look at each name once more, now that all clients and the server have ended."""
    blocks = Blocks(soak.most_bytes)
    wrong = []
    for number in range(table.names):
        row = table.row(number)
        assert row.quiet, f"{number} was never acknowledged: {row}"
        complaint = _complaint(str(mounted.path), number, row, blocks, soak)
        if complaint is not None:
            wrong.append(f"{number}: {complaint}")
    assert wrong == []


def _complaint(root: str, number: int, row: Row, blocks: Blocks, soak: Soak) -> str | None:
    try:
        with open(path_of(root, number), "rb") as file:
            data = read_all(file.fileno())
    except FileNotFoundError:
        # The leases of the clients have ended with them: a full pool may take any block now.
        return None if soak.full or not row.certain else f"is gone: {row}"
    return "was removed" if row.left.version == ABSENT else blocks.complaint(data, row.left)


def skip_without_takeover(mounted: Supervised) -> None:
    """Skip the test where the kernel cannot be asked again (before Linux 6.9)."""
    takeover = mounted.status()["takeover"]
    if takeover != "possible" and not kernel_has_passthrough():
        pytest.skip(f"no take-over: {takeover}")
    assert takeover == "possible"
