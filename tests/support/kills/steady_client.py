"""One client of a mount that is never down: every call must succeed, whatever its server meets.

Run as a program; it prints one JSON object at its end. It is a client of a soak in which there is
one server from beginning to end, as far as it can tell: an error of any call ends it with a fault,
and so does a wrong byte, and a block that was acknowledged and is gone. What was acknowledged is
told by the table (soak/table.py), outside of the mount.
"""

import mmap
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from kvfs.cli.arguments import locate
from kvfs.cli.follow import follow
from kvfs.core.errors import CommandError
from tests.support.kills.soak.client import Client, arguments, report
from tests.support.kills.soak.owner import Fault
from tests.support.kills.soak.table import NOTHING, Found, path_of
from tests.support.kills.steady_calls import CallClock
from tests.support.kills.steady_locks import Locks
from tests.support.kills.steady_logs import Logs
from tests.support.kills.steady_names import Names

#: What each kind of client does, and how often.
KINDS: Final[dict[str, dict[str, float]]] = {
    "renames": {"store": 20, "write_slowly": 20, "rename_over": 4, "unlink": 4, "load": 10},
    "direct": {"store": 20, "write_slowly": 10, "load": 10},
    "in_place": {"store_in_place": 20, "unlink": 4, "load": 10, "set_attribute": 4},
    "mapped": {"store_mapped": 20, "load": 10, "look_at_kept": 20},
    "truncates": {"store_in_place": 20, "truncate": 4, "rewrite": 8, "write_slowly": 10},
    "loads": {"load": 40, "look_at_kept": 20},
    "looks": {"look": 40, "list_names": 4, "check_attribute": 4, "change_names": 30},
    "evicts": {"store": 20, "evict": 10, "load": 10},
    "locks": {"lock": 40, "load": 4},
    "logs": {"append": 40, "list_many": 4},
}
_CHANGES_NONE: Final = frozenset({"loads", "looks", "locks", "logs"})
#: A command's connection ends with its server, and no kernel sends it anew. So long it is tried.
_COMMAND_WAIT_S: Final = 20.0
#: The kernel may lead there for a moment longer, and an OPEN is answered for a second.
_GONE_WAIT_S: Final = 5.0


class SteadyClient(Client):
    """A client of one of the kinds; those that change blocks do so to names of their own."""

    def __init__(self, args: Any) -> None:  # noqa: ANN401
        super().__init__(args)
        self.clock = CallClock()
        self.clock.install()
        self.direct_share = 1.0 if args.kind == "direct" else 0.0
        draw = random.Random(f"{args.seed}/{args.client}")
        self.locks: Locks | None = None
        if args.kind == "locks":
            self.locks = Locks(f"{args.root}/locks", args.locks, args.client, draw)
        self.logs: Logs | None = None
        if args.kind == "logs":
            os.mkdir(directory := f"{args.root}/logs-{args.client}")
            self.logs = Logs(directory, draw)
        self.names: Names | None = None
        if args.kind == "looks":
            self.names = Names(f"{args.root}/names-{args.client}", draw)
        if args.kind in _CHANGES_NONE:
            self.own = range(0)

    def steps(self) -> list[tuple[float, Callable[[], object]]]:
        return [(weight, getattr(self, name)) for name, weight in KINDS[self.args.kind].items()]

    def step(self, do: Callable[..., object], *arguments: int) -> None:
        super().step(do, *arguments)
        self.pause.wait(self.random.uniform(0, 2 * self.args.pause_s))

    def store_mapped(self) -> None:
        """Store by a mapping: its size first, then its bytes, then the rename."""
        number = self.picked()
        meant = self.new()
        path = path_of(self.args.root, number)
        temporary = f"{path}.{self.args.client}-{self.serial}.tmp"
        self.temporaries.add(temporary)
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        os.ftruncate(fd, meant.size_bytes)
        with mmap.mmap(fd, meant.size_bytes) as mapping:
            mapping[:] = self.blocks.made(meant.version, meant.size_bytes)
        os.close(fd)
        self.rename_to(number, meant, temporary)

    def look(self) -> None:
        """Look at the attributes of a block."""
        number = self.random.randrange(self.table.names)
        before = self.table.row(number)
        try:
            status = os.stat(path_of(self.args.root, number))
        except FileNotFoundError:
            self.judge_missing(number, before, self.epoch)
            return
        after = self.table.row(number)
        if before == after and before.quiet and status.st_size != before.left.size_bytes:
            raise Fault(f"{number} has {status.st_size} bytes: {before}")

    def change_names(self) -> None:
        assert self.names is not None
        self.names.step()

    def append(self) -> None:
        assert self.logs is not None
        self.logs.append()

    def list_many(self) -> None:
        assert self.logs is not None
        self.logs.list_many()

    def lock(self) -> None:
        assert self.locks is not None
        self.locks.step()

    def evict(self) -> None:
        """Evict one of its blocks by command."""
        number = self.there()
        if number is None:
            return
        left, path = self.table.row(number).left, path_of(self.args.root, number)
        self.begin(number, NOTHING)
        evicted, tried = self._evict(path)
        until_s = time.monotonic() + _GONE_WAIT_S
        while (is_there := _opens(path)) and evicted and time.monotonic() < until_s:
            self.pause.wait(0.02)
        if is_there and (evicted or tried == 1):
            raise Fault(f"{number} was evicted ({evicted}, tried {tried}) and is there")
        self.settle(number, left if is_there else NOTHING)

    def _evict(self, path: str) -> tuple[int, int]:
        """Return how many blocks went, and how often the command was tried."""
        tried, until_s = 0, time.monotonic() + _COMMAND_WAIT_S
        while True:
            tried += 1
            if tried > 1 and not _opens(path):
                return 0, tried
            try:
                order = {"bytes": None, "match": None, "unused_for_s": None, "dry_run": False}
                done = follow(locate([path]), "evict", order, lambda *_: ("", 0, 0), quiet=True)
                return int(done["blocks"]), tried
            except CommandError as error:
                self.counts["commands_again"] += 1
                if time.monotonic() > until_s:
                    raise Fault(f"kvfs evict {path}: {error}") from error
            self.pause.wait(0.05)

    def settle(self, number: int, left: Found, *, in_place: bool = False) -> None:
        super().settle(number, left, in_place=in_place)
        self.counts["acknowledged"] += 1

    def run(self) -> dict[str, Any]:
        counts: dict[str, Any] = super().run()
        long = sorted(self.clock.long)
        return {"kind": self.args.kind, **counts, "calls": self.clock.calls, "long": long}


def _opens(path: str) -> bool:
    """Whether *path* is there. OPEN asks the server; stat may tell what the kernel still keeps."""
    try:
        os.close(os.open(path, os.O_RDONLY))
    except FileNotFoundError:
        return False
    return True


def main() -> int:
    """Run one client."""
    parser = arguments()
    parser.add_argument("--kind", choices=sorted(KINDS), required=True)
    parser.add_argument("--locks", required=True)
    parser.add_argument("--pause-s", type=float, required=True)
    return report(SteadyClient(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
