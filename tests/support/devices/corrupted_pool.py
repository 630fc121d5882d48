"""A small pool with some of everything, and whether what is read of it is right.

Each name has the contents that it ever had: after an older copy of something it may have gone back.
"""

import stat
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from kvfs.core.directory_policy import PIN
from kvfs.core.errors import KvfsError
from kvfs.core.types import ROOT_INODE, InodeNo
from tests.support.clients.stepping import until
from tests.support.store.driven import Driven
from tests.support.store.stores import SYMLINK, Host, get, make_directory, put, settle

_BLOCKS: Final = 24
#: The worst last.
CAME: Final = ("right", "miss", "unexpected error", "wrong")


@dataclass(slots=True)
class Known:
    """What each path ever was: bytes, or the target of a symlink."""

    blocks: dict[bytes, list[bytes]] = field(default_factory=dict)

    def note(self, path: bytes, data: bytes) -> None:
        """Note that *path* is *data* now."""
        self.blocks.setdefault(path, []).append(data)


@dataclass(slots=True)
class Found:
    """How many names were right, a miss, or worse."""

    came: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)

    def __or__(self, other: "Found") -> "Found":
        return Found(self.came | other.came, self.lines + other.lines)

    def worst(self) -> str:
        """Return the worst that came."""
        return CAME[max((CAME.index(came) for came in self.came), default=0)]

    def counts(self) -> dict[str, Any]:
        """Return the counts, and what was worse than a miss."""
        return {**self.came, "lines": self.lines[:4]}


def fill(running: Host, known: Known, turn: int) -> None:
    """Store blocks under many names, and change some; *turn* 0 is the first."""
    store = running.store
    if turn == 0:
        for name in (b"one", b"two", b"three"):
            make_directory(running, name)
    for number in range(_BLOCKS):
        top = (b"one", b"two", b"three")[number % 3]
        parent = store.lookup(ROOT_INODE, top)
        name = b"block-%d-%s" % (number, b"x" * (number % 60))
        if turn == 1 and number == _BLOCKS // 2:
            store.log_index()
            let_pass(store)
            settle(store)
        if turn == 1 and number % 4:
            continue
        data = b"%d.%d " % (turn, number) * (number * 40)
        put(store, parent, name + b".tmp", data)
        store.rename(parent, name + b".tmp", parent, name)
        known.note(top + b"/" + name, data)
    parent = store.lookup(ROOT_INODE, b"one")
    ino = store.lookup(parent, b"block-0-")
    store.set_xattr(ino, b"user.note", b"%d" % turn)
    store.set_xattr(store.lookup(ROOT_INODE, b"two"), PIN, b"%d" % turn)
    store.make_node(ROOT_INODE, b"link%d" % turn, SYMLINK, 0, 0, b"one/%d" % turn)
    known.note(b"link%d" % turn, b"one/%d" % turn)
    let_pass(store)
    settle(store)


def let_pass(store: Driven) -> None:
    """Let the pass make all durable; ``settle`` would do so without checksums."""

    def is_durable() -> bool:
        store.tick()
        store.run_all()
        return store.listed() == 0

    until(is_durable, "all is durable")


def read_all(store: Driven, known: Known) -> Found:
    """Load every known name, and every name that is listed; what fails is tried once more.

    The kernel looks up again by itself when an answer is ESTALE.
    """
    found = Found()
    paths = set(known.blocks) | _listed(store, found)
    for path in sorted(paths):
        came, line = _load(store, known, path)
        if came == "again":
            came, line = _load(store, known, path)
        came = "unexpected error" if came == "again" else came
        found.came[came] += 1
        if line and came != "miss":
            found.lines.append(line)
    return found


def _load(store: Driven, known: Known, path: bytes) -> tuple[str, str]:
    top, _, name = path.rpartition(b"/")
    try:
        parent = store.lookup(ROOT_INODE, top) if top else ROOT_INODE
        record = store.record(store.lookup(parent, name))
        if stat.S_ISDIR(record.mode):
            return "right", ""
        data = record.target if stat.S_ISLNK(record.mode) else get(store, parent, name)
    except KvfsError as error:
        # NotFound is a miss; DeadInode and Damaged are ESTALE, and then a miss.
        miss = type(error).__name__ in ("NotFound", "NotADirectory")
        return ("miss" if miss else "again"), repr(error)
    except Exception as error:  # a wrong length, or what nobody expects
        return "again", repr(error)
    right = data in known.blocks.get(path, ())
    return ("right", "") if right else ("wrong", f"{path!r}: {len(data)} bytes {data[:20]!r}")


def _listed(store: Driven, found: Found) -> set[bytes]:
    paths = set[bytes]()
    for ino, name in _children(store, ROOT_INODE, found):
        paths.add(name)
        paths |= {name + b"/" + child for _, child in _children(store, ino, found)}
    return paths


def _children(store: Driven, ino: InodeNo, found: Found) -> list[tuple[InodeNo, bytes]]:
    try:
        return store.children(ino, InodeNo(0))
    except KvfsError:
        return []
    except Exception as error:
        found.came["unexpected error"] += 1
        found.lines.append(f"listing: {error!r}")
        return []
