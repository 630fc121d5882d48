"""A client of a soak as the owner of names: how it tells the others what it changes.

A change is begun, made, and settled if one server served all the while. What a server's end cut
off stays begun, until its owner has looked what is left.
"""

import argparse
import os
import random
import threading
from collections import Counter
from typing import Final

from tests.support.kills.soak.blocks import ALIGNED, Blocks
from tests.support.kills.soak.kept import KeptWriter, Shelf
from tests.support.kills.soak.table import NOTHING, Found, Table, path_of

_WRITING: Final = ("draft", "rewrite", "slab_draft", "torn")
#: What may not go while its maker lives.
STAYS: Final = ("leased", "slab")
_CLOSED_WAIT_S: Final = 20.0
PAUSE_S: Final = 0.002


class Fault(Exception):
    """A promise was broken."""


class Superseded(Exception):
    """The server went in the middle of a change; what is left of it is looked up later."""


class Owner:
    """Changes the names whose number is its own modulo *clients*, and loads all of them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.random = random.Random(f"{args.seed}/{args.client}")
        self.table = Table(args.table)
        self.blocks = Blocks(args.most_bytes)
        self.shelf = Shelf(self.table, self.blocks)
        self.own = range(args.client, self.table.names, args.clients)
        self.counts: Counter[str] = Counter()
        self.serial = 0
        #: What a change that was cut off meant to leave, and whether nothing may be left of it.
        self.meant: dict[int, tuple[Found, bool]] = {}
        self.attributes: dict[int, bytes] = {}
        self.writer: KeptWriter | None = None
        #: Names whose block may not go, oldest first: of these a full pool takes so many.
        self.staying: list[int] = []
        #: Versions whose file was cut or made longer.
        self.cut: set[int] = set()
        #: Versions that were renamed: readers of the former name know nothing of a change in place.
        self.moved: set[int] = set()
        #: Temporary names that were not renamed yet.
        self.temporaries: set[str] = set()
        self.epoch = 0
        self.pause = threading.Event()

    def version(self) -> int:
        self.serial += 1
        return (int(self.args.client) + 1) << 40 | self.serial

    def begin(self, number: int, meant: Found, *, shown: bool = False, lossy: bool = False) -> None:
        """Announce a change; *lossy*: a killed server may take the name."""
        self.meant[number] = (meant, lossy)
        self.attributes.pop(number, None)
        self.table.begin(number, meant.version, shown=shown, lossy=lossy)

    def settle(self, number: int, left: Found, *, in_place: bool = False) -> None:
        """Say that a change came to its end, all of it under one server."""
        stays = in_place and self.wait_closed(path_of(self.args.root, number)) in STAYS
        if self.table.epoch != self.epoch:
            raise Superseded
        self.note(number, left, stays=stays)

    def note(self, number: int, left: Found, *, stays: bool) -> None:
        """Say what a name holds; a full pool may let it go unless it *stays*."""
        if number in self.staying:
            self.staying.remove(number)
        if stays:
            self.staying.append(number)
        certain = left != NOTHING and (stays or not self.args.full)
        self.table.settle(number, left, certain=certain)
        self.meant.pop(number, None)

    def wait_closed(self, path: str) -> str:
        """Return the state of a block, once the server has read the last close."""
        for _ in range(int(_CLOSED_WAIT_S / PAUSE_S)):
            state = os.getxattr(path, "user.kvfs.state").decode()
            if state not in _WRITING:
                return state
            self.pause.wait(PAUSE_S)
        raise Fault(f"{path} is still {state} {_CLOSED_WAIT_S} s after its last close")

    def size(self) -> int:
        least, most = self.args.least_bytes, self.args.most_bytes
        size_bytes = int(least * (most / least) ** self.random.random())
        odd_bytes = self.random.choice((0, 0, 1000))
        return max(ALIGNED, size_bytes // ALIGNED * ALIGNED - odd_bytes)

    def new(self) -> Found:
        size_bytes = self.size()
        return Found(self.version(), size_bytes, size_bytes)

    def picked(self) -> int:
        return self.random.choice(self.own)

    def there(self) -> int | None:
        """Return a name of its own that was there when it was changed last."""
        some = [n for n in self.own if self.table.row(n).left.version and self.is_free(n)]
        return self.random.choice(some) if some else None

    def to_change(self) -> int | None:
        """Return a name to change in place, if a full pool can do with one more of these."""
        number = self.there()
        if number is None or len(self.staying) >= self.args.staying_max:
            return None
        # A file that was cut is a slab: what of it is rewritten is no block's business.
        version = self.table.row(number).left.version
        return None if version in self.moved or version in self.cut else number

    def is_free(self, number: int) -> bool:
        """Whether it has no writer, but one whose server is dead."""
        writer = self.writer
        return writer is None or writer.number != number or writer.epoch != self.epoch
