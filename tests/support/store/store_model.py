"""The store as dicts: what a pool must look like after any history, and after each kind of end."""

import stat
from collections.abc import Iterator
from typing import NamedTuple

from kvfs.core.errors import (
    Exists,
    InvalidRequest,
    IsADirectory,
    KvfsError,
    NotADirectory,
    NotEmpty,
    NotFound,
    NotPermitted,
    TooManyLinks,
)
from kvfs.core.lifecycle import (
    FINAL,
    HELD,
    IDENTIFIED,
    SLABS,
    UNFINISHED,
    Event,
    State,
    after,
    is_temporary,
)
from kvfs.core.types import InodeNo

#: Open for writing, and torn if that ends in the middle.
TEARABLE = UNFINISHED | {State.REWRITE, State.RENAMED}


class Node:
    """An inode of the model; ``written`` are the pages that hold bytes, the others are holes.

    ``changed`` says whether bytes were written since it was opened for writing or renamed,
    ``adds`` whether they were added only, ``before`` what it was then.
    """

    def __init__(self, ino: InodeNo, mode: int) -> None:
        self.ino = ino
        self.mode = mode
        self.data = bytearray()
        self.target = b""
        self.children: dict[bytes, Node] = {}
        self.state = State.DRAFT
        self.before = State.DRAFT
        self.recorded_empty = True
        self.changed = self.adds = self.renamed = False
        self.has_name = True
        self.xattrs: dict[bytes, bytes] = {}
        self.writers = 0
        self.readers = 0
        #: Where its second name is: the one that it was linked from.
        self.alias: tuple[Node, bytes] | None = None

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    # ---- its life ----

    def happens(self, event: Event) -> None:
        self.state = after(self.state, event)

    def open_writer(self) -> None:
        self.writers += 1
        if not self.has_name or self.state in UNFINISHED:
            return
        if self.writers == 1 or self.state is State.RENAMED:
            renamed = self.state is State.RENAMED
            self.before = State.PUBLISHED if renamed else self.state
            self.changed = self.renamed = False
            self.adds = not self.data and not renamed
            self.recorded_empty = self.recorded_empty if renamed else not self.data
            self.happens(Event.REOPEN)

    def close_writer(self) -> None:
        self.writers -= 1
        if self.writers or not self.has_name:
            return
        if self.state is State.REWRITE and not self.changed:
            self.state = self.before
        else:
            adds = self.state is State.REWRITE and self.adds and self.before in FINAL
            self.happens(Event.EXTEND if adds else Event.CLOSE)
        if self.renamed:
            self.happens(Event.RENAME)
        self.renamed = False

    def rename(self) -> None:
        if not self.is_file:
            return
        if self.writers and self.state not in UNFINISHED:
            self.renamed = True
            return
        self.happens(Event.RENAME)
        self.changed = False
        self.recorded_empty = not self.data

    @property
    def link_error(self) -> type[KvfsError] | None:
        """What link(2) must refuse with; all blocks have one maker here."""
        if self.is_file and self.alias is not None:
            return TooManyLinks
        written = self.state in UNFINISHED and self.writers > 0
        return None if self.is_file and (written or self.state in HELD) else NotPermitted

    @property
    def is_torn_by_an_end(self) -> bool:
        """Whether nobody could tell its bytes from whole ones if its writers vanished now."""
        return self.state in UNFINISHED or (self.state in TEARABLE and self.changed)

    @property
    def must_be_superseded(self) -> bool:
        """Whether O_TRUNC must leave it to those who have it."""
        if self.state in UNFINISHED:
            return self.writers > 0
        return bool(self.data) or self.writers + self.readers > 0

    # ---- its bytes ----

    def write(self, data: bytes, offset_bytes: int) -> None:
        if data:
            self.changed = True
            end_bytes = offset_bytes + len(data)
            if end_bytes > len(self.data):
                self.data.extend(bytes(end_bytes - len(self.data)))
            self.data[offset_bytes:end_bytes] = data

    def truncate(self, size_bytes: int) -> None:
        if size_bytes > len(self.data) and self.has_name:
            if self.state is State.REWRITE and self.recorded_empty:
                self.state = self.before
            self.happens(Event.ALLOCATE)
        if self.writers:
            self._cut(size_bytes)
            self.adds = False
        else:
            self.open_writer()
            self._cut(size_bytes)
            self.close_writer()

    def _cut(self, size_bytes: int) -> None:
        self.changed = True
        del self.data[size_bytes:]
        self.data.extend(bytes(size_bytes - len(self.data)))


class Displaced(NamedTuple):
    """A draft, and the name that it lost."""

    parent: Node
    name: bytes
    node: Node


class Model:
    """The tree, and who has what open."""

    def __init__(self, root: Node) -> None:
        self.root = root
        #: Drafts whose name another writer took, oldest first.
        self.displaced: list[Displaced] = []

    def tree(self) -> dict[bytes, object]:
        """Return what ``stores.tree`` should return."""
        found: dict[bytes, object] = {}
        for path, node in self.walk():
            if node.is_directory:
                found[path] = "directory"
            elif node.is_file:
                found[path] = bytes(node.data)
            else:
                found[path] = node.target if stat.S_ISLNK(node.mode) else "special"
        return found

    def walk(self, top: Node | None = None, path: bytes = b"") -> Iterator[tuple[bytes, Node]]:
        """Yield every named node below *top* with its path."""
        for name, node in (top or self.root).children.items():
            yield path + b"/" + name, node
            if node.is_directory:
                yield from self.walk(node, path + b"/" + name)

    def directories(self) -> list[Node]:
        return [self.root, *(node for _, node in self.walk() if node.is_directory)]

    def places(self) -> list[tuple[Node, bytes]]:
        """Return every (directory, name) there is."""
        return [(parent, name) for parent in self.directories() for name in parent.children]

    def rename_error(
        self, parent: Node, name: bytes, target: Node, new_name: bytes, *, replace: bool
    ) -> type[KvfsError] | None:
        """Return what rename(2) must refuse with."""
        node = parent.children[name]
        other = target.children.get(new_name)
        if node.is_directory and self.is_within(target, node):
            return InvalidRequest
        if other is None or other is node:
            return Exists if other is node and not replace else None
        if not replace:
            return Exists
        if other.is_directory:
            if not node.is_directory:
                return IsADirectory
            return NotEmpty if other.children else None
        return NotADirectory if node.is_directory else None

    def exchange_error(
        self, parent: Node, name: bytes, target: Node, new_name: bytes
    ) -> type[KvfsError] | None:
        """Return what RENAME_EXCHANGE must refuse with."""
        node, other = parent.children[name], target.children[new_name]
        if node is other:
            return None
        if node.is_directory and self.is_within(target, node):
            return InvalidRequest
        if other.is_directory and self.is_within(parent, other):
            return InvalidRequest
        return None

    def is_within(self, node: Node, top: Node) -> bool:
        """Whether *node* is *top* or lies below it."""
        return node is top or any(found is node for _, found in self.walk(top))

    # ---- names that writers take from each other ----

    def supersede(self, parent: Node, name: bytes, ino: InodeNo) -> Node:
        """Give the name to a fresh draft; who writes the old one may still rename it."""
        node = parent.children[name]
        if node.state in UNFINISHED:
            self.displaced.append(Displaced(parent, name, node))
        fresh = Node(ino, node.mode)
        fresh.alias = node.alias
        for at, each in self.places():
            if at.children[each] is node:
                at.children[each] = fresh
        node.has_name, node.alias = False, None
        fresh.xattrs, node.xattrs = node.xattrs, {}
        return fresh

    def meant(self, parent: Node, name: bytes) -> Node | type[KvfsError] | None:
        """Return the finished draft that a rename of *name* means, or what it must refuse with."""
        node = parent.children[name]
        lost = [each.node for each in self.displaced if each[:2] == (parent, name)]
        if not lost or not node.writers or node.state not in TEARABLE:
            return None
        finished = [other for other in lost if not other.writers]
        return finished[-1] if finished else NotFound

    def restore(self, node: Node, target: Node, new_name: bytes) -> None:
        """Give a displaced draft its final name."""
        self.displaced = [each for each in self.displaced if each.node is not node]
        self.remove(target, new_name)
        node.state, node.has_name = State.PUBLISHED, True
        target.children[new_name] = node

    def remove(self, parent: Node, name: bytes) -> None:
        """Take a name, if it is there; a block with two keeps the other."""
        node = parent.children.pop(name, None)
        if node is not None:
            node.has_name, node.alias = node.alias is not None, None

    # ---- second names ----

    def link(self, node: Node, target: Node, new_name: bytes) -> None:
        """Give *node* another name; its first one is its alias."""
        node.alias = next(place for place in self.places() if place[0].children[place[1]] is node)
        target.children[new_name] = node
        node.rename()

    def move(self, parent: Node, name: bytes, target: Node, new_name: bytes) -> None:
        """Rename what is there to a name that is free."""
        node = target.children[new_name] = parent.children.pop(name)
        if node.alias == (parent, name):
            node.alias = (target, new_name)
        else:
            node.rename()

    def exchange(self, parent: Node, name: bytes, target: Node, new_name: bytes) -> None:
        """Swap two names."""
        first, second = parent.children[name], target.children[new_name]
        if first is second:
            return
        parent.children[name], target.children[new_name] = second, first
        aliases = [(first, (parent, name), (target, new_name))]
        aliases.append((second, (target, new_name), (parent, name)))
        for node, place, now in aliases:
            if node.alias == place:
                node.alias = now

    # ---- the ends ----

    def stop(self) -> None:
        """Lose what is in writing; close the rest."""
        for parent, name in self.places():
            node = parent.children[name]
            if node.writers and node.is_torn_by_an_end:
                self.remove(parent, name)
            elif node.writers:
                node.writers = 1
                node.close_writer()
        self._forget_handles()

    def kill(self) -> None:
        """Lose what a killed server loses: what is in writing, and every handle."""
        for parent, name in self.places():
            node = parent.children[name]
            if node.is_file and node.is_torn_by_an_end:
                self.remove(parent, name)
            elif node.state is State.REWRITE:
                node.state = State.REWRITTEN
            elif node.state is State.RENAMED:
                node.state = State.PUBLISHED
        self._forget_handles()

    def lose_power(self, *, logged: bool = False) -> None:
        """Lose what is being written, or its maker's alone, and all second names.

        *logged*: the index was, and so knows which blocks their makers left without a last name.
        """
        for _, node in list(self.walk()):
            if node.alias is not None:
                self.remove(*node.alias)
        for parent, name in self.places():
            node = parent.children[name]
            kept = True
            if node.is_file:
                kept = node.state in IDENTIFIED and not node.writers
                is_left = node.state is State.LEASED and is_temporary(name)
                if logged and (is_left or node.state is State.ORPHAN):
                    node.state = State.ORPHAN
                else:
                    node.state = State.ORPHAN_SLAB if node.state in SLABS else State.PUBLISHED
            if not kept:
                self.remove(parent, name)
        self._forget_handles()

    def _forget_handles(self) -> None:
        self.displaced.clear()
        for _, node in self.walk():
            node.readers = node.writers = 0
