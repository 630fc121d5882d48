"""One client of a soak: it stores, changes and loads blocks while servers are killed under it.

Run as a program; it prints one JSON object at its end. Its choices follow from the seed. What it
finds wrong ends it with the first fault, which says what was found and what had been promised.
"""

import argparse
import faulthandler
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Final

from tests.support.kills.soak.blocks import ALIGNED
from tests.support.kills.soak.changes import Changes
from tests.support.kills.soak.looks import Looks
from tests.support.kills.soak.owner import Fault, Superseded

#: Between two looks while no server serves: the next one is to start meanwhile.
_NO_SERVER_S: Final = 0.03


class Client(Changes, Looks):
    """Changes the names whose number is its own modulo *clients*, and loads all of them."""

    def steps(self) -> list[tuple[float, Callable[[], object]]]:
        return [
            (20, self.store),
            (8, self.store_in_place),
            (5, self.rewrite),
            (4, self.truncate),
            (5, self.unlink),
            (4, self.rename_over),
            (8, self.write_slowly),
            (4, self.set_attribute),
            (4, self.check_attribute),
            (4, self.list_names),
            (40, self.load),
            (12, self.look_at_kept),
        ]

    def step(self, do: Callable[..., object], *arguments: int) -> None:
        """Do one thing, unless no server serves; an error counts while one does."""
        self.epoch = self.table.epoch
        self.table.beat(self.args.client, time.monotonic())
        try:
            if self.epoch % 2:
                self.look_at_kept()
                self.pause.wait(_NO_SERVER_S)
                return
            self.recover()
            do(*arguments)
            self.counts[do.__name__] += 1
        except Superseded:
            self.counts["superseded"] += 1
        except OSError as error:
            if self.table.epoch == self.epoch:
                where = f"in epoch {self.epoch}, step {self.counts}, {self.meant}, {self.staying}"
                msg = f"{do.__name__}: {error!r} {where}"
                raise Fault(msg) from error
        finally:
            self.table.beat(self.args.client, 0)

    def run(self) -> dict[str, int]:
        weights, steps = zip(*self.steps(), strict=True)
        while not self.table.ends:
            self.step(self.random.choices(steps, weights)[0])
        while self.writer is not None:
            self.step(self.write_slowly)
        for number in self.own:
            self.step(self.load, number)
        for kept in list(self.shelf.kept):
            if wrong := self.shelf.look(kept):
                raise Fault(wrong)
        self.shelf.close()
        return {**self.counts, **self.shelf.counts}


def arguments() -> argparse.ArgumentParser:
    """Return the parser of a client's command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("table")
    parser.add_argument("--client", type=int, required=True)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--least-bytes", type=int, default=ALIGNED)
    parser.add_argument("--most-bytes", type=int, required=True)
    parser.add_argument("--staying-max", type=int, required=True)
    return parser


def report(client: Client) -> int:
    """Run *client*, print what it counted or the fault, and return the exit code."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        print(json.dumps(client.run()))
    except Fault as fault:
        print(json.dumps({"fault": str(fault), "client": client.args.client}), flush=True)
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(report(Client(arguments().parse_args())))
