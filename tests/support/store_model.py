"""The store as dicts: what a pool must look like after any history, and after each kind of end."""

import stat
from collections.abc import Iterator
from typing import Literal

from kvfs.errors import (
    Exists,
    InvalidRequest,
    IsADirectory,
    KvfsError,
    NotADirectory,
    NotEmpty,
)
from kvfs.types import PAGE_BYTES, InodeNo, round_up

State = Literal["draft", "published", "rewrite"]


class Node:
    """An inode of the model; ``written`` are the pages that hold bytes, the others are holes."""

    def __init__(self, ino: InodeNo, mode: int) -> None:
        self.ino = ino
        self.mode = mode
        self.data = bytearray()
        self.written: set[int] = set()
        self.target = b""
        self.children: dict[bytes, Node] = {}
        self.state: State = "published"
        self.xattrs: dict[bytes, bytes] = {}
        self.writers = 0
        self.readers = 0

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    def write(self, data: bytes, offset_bytes: int) -> None:
        if data:
            end_bytes = offset_bytes + len(data)
            if end_bytes > len(self.data):
                self.data.extend(bytes(end_bytes - len(self.data)))
            self.data[offset_bytes:end_bytes] = data
            self.written |= set(range(offset_bytes // PAGE_BYTES, -(-end_bytes // PAGE_BYTES)))

    def truncate(self, size_bytes: int) -> None:
        self.written -= set(range(round_up(size_bytes) // PAGE_BYTES, 1 << 10))
        del self.data[size_bytes:]
        self.data.extend(bytes(size_bytes - len(self.data)))

    @property
    def is_whole(self) -> bool:
        """Whether every page of it was written, so that it is provably there after a power loss."""
        return self.written >= set(range(round_up(len(self.data)) // PAGE_BYTES))


class Model:
    """The tree, and who has what open."""

    def __init__(self, root: Node) -> None:
        self.root = root

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

    def stop(self) -> None:
        """Publish what is open."""
        for _, node in self.walk():
            node.state, node.readers, node.writers = "published", 0, 0

    def kill(self) -> None:
        """Lose what a killed server loses: drafts, and every handle."""
        for parent, name in self.places():
            node = parent.children[name]
            node.readers = node.writers = 0
            if node.state == "draft":
                del parent.children[name]
            node.state = "published"

    def lose_power(self) -> None:
        """Lose what has no identity, or is not provably whole, and all extended attributes."""
        for parent, name in self.places():
            node = parent.children[name]
            kept = node.is_directory or stat.S_ISLNK(node.mode)
            if node.is_file:
                kept = node.state == "published" and node.is_whole
            if not kept:
                del parent.children[name]
            node.readers = node.writers = 0
            node.xattrs.clear()
