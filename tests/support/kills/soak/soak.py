"""Clients at work on one mount while its server is killed, stopped and started again and again."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.support.clients.churn import Usage, own_xfs
from tests.support.kills.soak.kept import KEPT_MAX
from tests.support.kills.soak.table import Table, hides_drafts
from tests.support.mounts.mounting import (
    ROOT,
    Mounted,
    loop_device,
    own_tmpfs,
    run_kvfs,
    workplace,
)

MIB: Final = 1 << 20
#: What a client does at once takes milliseconds; each of its calls waits for room at most
#: ``room_wait_s``. Beyond this a call hangs.
HANGS_S: Final = 60.0
_LOOK_S: Final = 0.05
#: What an XFS takes meanwhile to map what the pool holds.
TREES_BYTES: Final = MIB
_ENDS_S: Final = 120.0
#: How one server after the other ends; "stop" is SIGTERM while the clients work.
WAYS: Final = ("kill", "stop", "kill twice", "stop and kill")


class Soak(NamedTuple):
    """One soak: what is mounted, what the clients do, for how long."""

    path: str
    #: Whether the clients' blocks are more than the pool holds.
    full: bool
    #: Whether the source is a drive, else a directory.
    drive: bool
    seconds: float
    seed: int
    #: Between one server's start and its end, at least and at most.
    least_s: float
    most_s: float
    #: So many servers come to their end at least, however long that takes.
    ends: int = len(WAYS)
    clients: int = 4
    #: What the mount has beside the defaults.
    flags: tuple[str, ...] = ()

    @property
    def capacity_bytes(self) -> int:
        return (96 if self.full else 1024) * MIB

    @property
    def held_most_bytes(self) -> int:
        """What clients of dead mounts keep at most: with passthrough, the extents they have open.

        No server knows of these, once they have no name (docs/durability.md).
        """
        kept = self.clients * (KEPT_MAX + 1)  # and the writer
        return kept * self.most_bytes if self.path == "passthrough" else 0

    @property
    def names(self) -> int:
        return 480 if self.full else 160

    @property
    def most_bytes(self) -> int:
        return 3 * MIB

    @property
    def staying_max(self) -> int:
        """How many blocks of a client may be of those that do not go; a quarter of the pool."""
        return 2 if self.full else self.names


@contextlib.contextmanager
def source_of(soak: Soak) -> Iterator[str]:
    """Yield a drive, or a directory in a file system of its own."""
    if soak.drive:
        with loop_device(2048 * MIB) as device:
            yield device
    elif soak.seed % 2:
        with own_tmpfs() as pool:
            yield str(pool)
    else:
        with own_xfs(2048 * MIB) as pool:
            yield str(pool)


class Driver:
    """Starts the clients, ends and starts the servers, and watches both."""

    client_module = "tests.support.kills.soak.client"

    def __init__(self, soak: Soak, mounted: Mounted, table: Table, place: Path) -> None:
        self.soak, self.mounted, self.table, self.place = soak, mounted, table, place
        self.random = random.Random(soak.seed)
        self.clients: list[subprocess.Popen[bytes]] = []
        self.counts: Counter[str] = Counter()
        self.pause = threading.Event()

    def begin(self, table_file: Path) -> None:
        """Make the directories and start the clients."""
        for number in range(4):
            directory = self.mounted.path / str(number)
            directory.mkdir()
            if hides_drafts(number):
                os.setxattr(directory, "user.kvfs.drafts", b"owner")
        for client in range(self.soak.clients):
            with (
                (self.place / f"out-{client}").open("wb") as out,
                (self.place / f"err-{client}").open("wb") as err,
            ):
                self.clients.append(
                    subprocess.Popen(
                        [
                            *(sys.executable, "-m", self.client_module),
                            *(str(self.mounted.path), str(table_file)),
                            *self.arguments(client),
                        ],
                        stdout=out,
                        stderr=err,
                        cwd=ROOT,
                        env={**os.environ, "PYTHONPATH": str(ROOT)},
                    )
                )

    def arguments(self, client: int) -> list[str]:
        """Return what the program of this client is told."""
        soak = self.soak
        return [
            *(f"--client={client}", f"--clients={soak.clients}"),
            *(f"--seed={soak.seed}", f"--most-bytes={soak.most_bytes}"),
            f"--staying-max={soak.staying_max}",
            *(["--full"] if soak.full else []),
        ]

    def watch(self, seconds: float) -> None:
        """Let them work for so long; raise AssertionError when one ends or hangs."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self.look()
            self.pause.wait(_LOOK_S)

    def look(self) -> None:
        """Raise AssertionError if a client has ended or hangs."""
        now_s = time.monotonic()
        for client, process in enumerate(self.clients):
            assert process.poll() is None, self.told()
            busy_s = self.table.busy_s(client, now_s)
            if busy_s > HANGS_S:
                raise AssertionError(f"client {client} hangs for {busy_s} s\n{self.stacks()}")

    def told(self) -> str:
        """Return what the clients that have ended said."""
        lines = [f"{self.soak} {dict(self.counts)}"]
        for client, process in enumerate(self.clients):
            if process.poll() is not None:
                out = (self.place / f"out-{client}").read_text()
                err = (self.place / f"err-{client}").read_text()
                lines.append(f"client {client} ended with {process.returncode}: {out}{err}")
        lines += self.mounted.log_file.read_text().splitlines()[-40:]
        return "\n".join(lines)

    def stacks(self) -> str:
        """Return where the clients and the server are."""
        for process in self.clients:
            process.send_signal(signal.SIGUSR1)
        self.pause.wait(1.0)
        pids = [process.pid for process in self.clients] + [self.mounted.server_pid]
        shown = [self.told()]
        for pid in pids:
            for task in Path(f"/proc/{pid}/task").glob("*"):
                with contextlib.suppress(OSError):
                    shown.append(f"{pid} {task.name}\n{(task / 'stack').read_text()}")
        shown += [(self.place / f"err-{client}").read_text() for client in range(len(self.clients))]
        return "\n".join(shown)

    def next_server(self, how: str) -> None:
        """End the server in one of the ways, and start the next one."""
        self.counts[how] += 1
        self.table.next_epoch()
        if how != "kill":
            self.mounted.ask_to_stop()
        if how == "stop":
            self.mounted.wait_stopped()
        else:
            if how == "stop and kill":
                self.pause.wait(self.random.uniform(0, 0.3))
            self.mounted.kill_daemon()
        if how == "kill twice":  # before the second one has swept
            self.mounted.start()
            self.mounted.kill_daemon()
        self.mounted.start()
        self.table.next_epoch()
        used_bytes = self.mounted.status()["used_bytes"]
        assert used_bytes <= self.soak.capacity_bytes, self.told()

    def end(self) -> list[dict[str, Any]]:
        """Let the clients come to their end; return what they counted."""
        self.table.end()
        until_s = time.monotonic() + _ENDS_S
        for process in self.clients:
            try:
                process.wait(max(1.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"a client does not end\n{self.stacks()}") from None
        assert all(process.returncode == 0 for process in self.clients), self.told()
        outs = [self.place / f"out-{client}" for client in range(len(self.clients))]
        return [json.loads(out.read_text()) for out in outs]

    def kill(self) -> None:
        """Leave no client behind."""
        for process in self.clients:
            process.kill()
            process.wait()


def soak_once(soak: Soak) -> dict[str, Any]:
    """Run one soak; return what was counted. Raises AssertionError with the first fault."""
    with workplace() as place, source_of(soak) as source:
        table_file = place / "table"
        table = Table.make(table_file, soak.names)
        flags = (f"--capacity={soak.capacity_bytes}", f"--data-path={soak.path}", *soak.flags)
        try:
            with Mounted(source, place / "kv", *flags) as mounted:
                driver = Driver(soak, mounted, table, place)
                try:
                    counts = _run(soak, driver, table_file, source)
                finally:
                    driver.kill()
            return counts
        finally:
            table.close()


def _run(soak: Soak, driver: Driver, table_file: Path, source: str) -> dict[str, Any]:
    mounted = driver.mounted
    assert mounted.status()["data_path"] == soak.path
    # A drive's file system is on no path; there only what the server counts is known.
    usage = None if soak.drive else Usage(Path(source), soak.capacity_bytes, TREES_BYTES)
    with usage or contextlib.nullcontext():
        driver.begin(table_file)
        until_s = time.monotonic() + soak.seconds
        turn = 0
        while time.monotonic() < until_s or turn < soak.ends:
            driver.watch(driver.random.uniform(soak.least_s, soak.most_s))
            driver.next_server(WAYS[turn % len(WAYS)])
            turn += 1
        driver.watch(soak.least_s)
        counted = driver.end()
    mounted.stop()
    found = run_kvfs("fsck", source, check=False)
    assert found.returncode == 0, f"{soak}: {found.stdout}{found.stderr}"
    assert mounted.errors() == [], f"{soak}: {mounted.errors()}"
    total: Counter[str] = Counter()
    for one in counted:
        total.update(one)
    most_bytes = usage.most_bytes if usage else 0
    bound_bytes = soak.capacity_bytes + soak.held_most_bytes
    assert most_bytes <= bound_bytes, f"{soak}: {most_bytes} bytes in extents"
    most_share = round(most_bytes / soak.capacity_bytes, 4)
    return {**soak._asdict(), **driver.counts, **total, "most_share": most_share}
