"""What was stored and acknowledged when, noted outside the drive that loses power.

A block has one name in one directory for as long as it lives; a directory may be renamed. What a
block has been is a list of publications; each is noted before its first call, with what it will be,
and acknowledged when its last call has returned. Times are ns of CLOCK_MONOTONIC.
"""

import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final, Self

from tests.support.devices.power_cuts.proving_blocks import fault_of, made

#: How a name ends while its block is being written.
TEMPORARY: Final = ".tmp"
#: How a block was stored that was linked to its name before it was closed.
LINKED: Final = "linked"
_NEVER: Final = 1 << 62
#: What a block never is, whatever became of its last write.
_NEVER_RIGHT: Final = ("another's", "garbled")


@dataclass(slots=True)
class Publication:
    """One content of a block: the version of each sector; *way* is how it was stored."""

    way: str
    versions: tuple[int, ...]
    size_bytes: int
    begun_ns: int
    acknowledged_ns: int = _NEVER


@dataclass(slots=True)
class Directory:
    """A directory, with every name it had, the newest last."""

    names: list[str]
    made_ns: int


@dataclass(slots=True)
class Block:
    """A block: where it is, and what it was."""

    number: int
    directory: int
    publications: list[Publication] = field(default_factory=list)
    #: When a call began that may take it away or replace it.
    disturbed_ns: list[int] = field(default_factory=list)
    #: A write to it in place was refused: nobody knows which of its bytes are new.
    spoilt: bool = False

    @property
    def name(self) -> str:
        """Return its last name."""
        return f"{self.number:05d}"


@dataclass(slots=True)
class Attribute:
    """One change of an attribute of a block or directory; None: it was removed, or never set."""

    of: Block | Directory
    name: str
    value: bytes | None
    begun_ns: int
    acknowledged_ns: int = _NEVER


@dataclass(slots=True)
class Listing:
    """The blocks that were there at one time."""

    at_ns: int
    blocks: frozenset[int]


@dataclass(slots=True)
class Ledger:
    """All that was done to one file system, and what must be true of it after a cut."""

    blocks: list[Block] = field(default_factory=list)
    directories: list[Directory] = field(default_factory=list)
    listings: list[Listing] = field(default_factory=list)
    #: Changes of attributes, in their order.
    attributes: list[Attribute] = field(default_factory=list)
    #: How many the server had evicted at the end.
    evicted_blocks: int = 0
    #: How many became durable later than the window, as the server tells.
    late_blocks: int = 0
    #: How many servers ended how while it was recorded, and honoured fsyncs.
    takeovers: Counter[str] = field(default_factory=Counter)
    fsyncs: int = 0
    #: Calls that were refused because the drive hung.
    refused_calls: int = 0
    #: From when until when the drive answered nothing, the oldest first.
    silences_ns: list[tuple[int, int]] = field(default_factory=list)
    #: When a ``kvfs sync``, or an honoured fsync, began and when it had returned.
    synced_ns: list[tuple[int, int]] = field(default_factory=list)
    #: How old a block gets at most before it is durable, without the time in which the drive hung;
    #: None: nobody promises.
    window_s: float | None = None

    def save(self, path: Path) -> None:
        """Write it to *path*."""
        path.write_bytes(pickle.dumps(self))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Return the ledger in the file *path*."""
        loaded = pickle.loads(path.read_bytes())
        assert isinstance(loaded, cls)
        return loaded

    def fault(self, path: str, data: bytes) -> str | None:
        """Return what is wrong with a file that was found at *path* (DIRECTORY/NAME)."""
        block = self.block_at(path)
        if block is None:
            return "another's"
        for publication in reversed(block.publications):
            if data == content(block.number, publication.versions, publication.size_bytes):
                return None
        found = fault_of(data, block.number)
        return None if block.spoilt and found not in _NEVER_RIGHT else found

    def has_first_name(self, path: str, data: bytes) -> bool:
        """Whether *data* is that of a block that lost the temporary name at *path* by its link."""
        block = self.block_at(path) if path.endswith(TEMPORARY) else None
        return block is not None and any(
            publication.way == LINKED
            and data == content(block.number, publication.versions, publication.size_bytes)
            for publication in block.publications
        )

    def way_of(self, path: str) -> str:
        """Return how the block at *path* was stored last."""
        block = self.block_at(path)
        return block.publications[-1].way if block and block.publications else "?"

    def block_at(self, path: str) -> Block | None:
        """Return the block that was ever at *path*."""
        directory, _, name = path.rpartition("/")
        number = int(name.removesuffix(TEMPORARY))
        if number >= len(self.blocks):
            return None
        block = self.blocks[number]
        return block if directory in self.directories[block.directory].names else None

    def due(self, cut_ns: int) -> Iterator[tuple[Block, int]]:
        """Yield the blocks that must be there after a cut, and from which publication on."""
        durable_ns = self._durable_ns(cut_ns)
        for block in self.blocks:
            old = [
                number
                for number, publication in enumerate(block.publications)
                if publication.acknowledged_ns <= durable_ns
            ]
            if not old:
                continue
            since_ns = block.publications[old[-1]].acknowledged_ns
            until_ns = min((at for at in block.disturbed_ns if at > since_ns), default=_NEVER)
            if until_ns > cut_ns and self._was_seen(block.number, cut_ns, until_ns):
                yield block, old[-1]

    def directory_at(self, name: str) -> Directory | None:
        """Return the directory that ever had this name."""
        return next((each for each in self.directories if name in each.names), None)

    def _durable_ns(self, cut_ns: int) -> int:
        """Return up to when what was acknowledged is durable at a cut."""
        durable_ns = max((begun for begun, done in self.synced_ns if done <= cut_ns), default=0)
        if self.window_s is not None:
            durable_ns = max(durable_ns, self._before_ns(cut_ns, int(self.window_s * 1e9)))
        return durable_ns

    def _before_ns(self, at_ns: int, window_ns: int) -> int:
        """Return when it was *window_ns* before *at_ns*, not counting while the drive hung."""
        for begun_ns, ended_ns in reversed(self.silences_ns):
            if begun_ns < at_ns:
                answered_ns = max(0, at_ns - ended_ns)
                if window_ns <= answered_ns:
                    break
                at_ns, window_ns = begun_ns, window_ns - answered_ns
        return at_ns - window_ns

    def latest_ns(self, last_ns: int, next_ns: int) -> int:
        """Return until when the power may go between two requests that came at these times.

        A drive that hangs says nothing: what is promised holds as well at the end of its silence.
        """
        return max(
            (ended for _, ended in self.silences_ns if last_ns < ended <= next_ns), default=last_ns
        )

    def values(
        self, of: Block | Directory, name: str, cut_ns: int
    ) -> tuple[list[bytes | None], list[bytes | None]]:
        """Return which values attribute *name* ever had, and which it may have after a cut."""
        changes = [each for each in self.attributes if each.of is of and each.name == name]
        begun = [each for each in changes if each.begun_ns <= cut_ns]
        durable_ns = self._durable_ns(cut_ns)
        due = [at for at, each in enumerate(begun, 1) if each.acknowledged_ns <= durable_ns]
        ever = [None, *(each.value for each in begun)]
        return ever, ever[due[-1] if due else 0 :]

    def is_there(self, block: Block, since: int, found: dict[str, bytes]) -> bool:
        """Whether *found* (by path) has *block*, not older than publication number *since*."""
        for directory in self.directories[block.directory].names:
            data = found.get(f"{directory}/{block.name}")
            if data is not None and any(
                data == content(block.number, each.versions, each.size_bytes)
                for each in block.publications[since:]
            ):
                return True
        return False

    def _was_seen(self, number: int, from_ns: int, until_ns: int) -> bool:
        """Whether it was there at some time from then on: it was not evicted before."""
        return any(
            from_ns <= listing.at_ns < until_ns and number in listing.blocks
            for listing in self.listings
        )


@lru_cache(maxsize=8192)
def content(block: int, versions: tuple[int, ...], size_bytes: int) -> bytes:
    """Return the bytes of a publication."""
    return made(block, versions, size_bytes)
