"""Checks that the pages of the index are consistent, without LMDB, which some damage crashes.

LMDB trusts the numbers in a page. One that leads out of the page or the file ends the process with
SIGSEGV, SIGBUS or an assertion. So the headers and bounds of all pages in use are checked before,
some thousand pages at a time. The layout is that of lib/mdb.c (MDB_page, MDB_node, MDB_ID) of LMDB
0.9 on a 64-bit machine. Inside these bounds each row has its own checksum.
"""

import mmap
import os
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvfs.core.errors import IndexDamaged
from kvfs.core.pool_layout import DATA_NAME
from kvfs.storage.lmdb_file import Tree, newest_trees

#: Pages copied and checked in one step: 16 MiB.
_STEP_PAGES: Final = 4096
_HEADER_BYTES: Final = 16
_NODE_BYTES: Final = 8
#: MDB_MAXKEYSIZE.
_KEY_MAX_BYTES: Final = 511
_BRANCH, _LEAF, _OVERFLOW = 0x01, 0x02, 0x04
#: A node whose value is in overflow pages (F_BIGDATA); kvfs does not use the other flags.
_BIG: Final = 0x01

Numbers = NDArray[np.int64]


class _Nodes(NamedTuple):
    """The nodes of one step: the page's row in the step, offset, key length, flags, low 32 bits."""

    row: Numbers
    at: Numbers
    key: Numbers
    flags: Numbers
    low: Numbers


def refuse_broken_pages(path: str) -> None:
    """Raise IndexDamaged unless all pages in use of the index in *path* are consistent.

    It reads them all. Nobody may write meanwhile. A read error of the device ends the process.
    """
    fd = os.open(f"{path}/{DATA_NAME}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as data:
            _Pages(data, path).check()
    finally:
        os.close(fd)


class _Pages:
    def __init__(self, data: mmap.mmap, path: str) -> None:
        self._psize, last_page, self._trees = newest_trees(path)
        count = min(len(data) // self._psize, last_page + 1)
        self._bytes = np.frombuffer(data, dtype=np.uint8, count=count * self._psize)
        self._pages = self._bytes.reshape(count, self._psize)
        self._count = count
        self._used = np.zeros(count, dtype=bool)

    def check(self) -> None:
        try:
            free_lists = self._tree(self._trees[0], keeps_values=True)
            self._tree(self._trees[1], keeps_values=False)
            for value in free_lists:
                self._free_list(value)
        finally:
            del self._pages, self._bytes  # the map cannot be closed while they exist

    def _tree(self, tree: Tree, *, keeps_values: bool) -> list[bytes]:
        """Check all pages of *tree*; return the values of its leaves if *keeps_values*."""
        values: list[bytes] = []
        level = np.array([tree.root] if tree.depth else [], dtype=np.int64)
        for below in range(tree.depth - 1, -1, -1):
            children: list[Numbers] = []
            for start in range(0, len(level), _STEP_PAGES):
                numbers = level[start : start + _STEP_PAGES]
                self._use(numbers)
                pages = self._pages[numbers]
                nodes = self._nodes(pages, numbers, _BRANCH if below else _LEAF)
                if below:
                    _hold(nodes.at + _NODE_BYTES + nodes.key <= self._psize, "a key")
                    children.append(nodes.low | nodes.flags << 32)
                else:
                    values += self._leaves(pages, nodes, keeps_values=keeps_values)
            level = np.concatenate(children) if children else np.array([], dtype=np.int64)
        return values

    def _use(self, numbers: Numbers) -> None:
        """Note that the pages *numbers* are in use; refuse a page that is used twice."""
        _hold((numbers >= 2) & (numbers < self._count), "a page number")
        _hold(~self._used[numbers], "a page that is used twice")
        self._used[numbers] = True
        if len(np.unique(numbers)) < len(numbers):
            raise _broken("a page that is used twice")

    def _nodes(self, pages: NDArray[np.uint8], numbers: Numbers, kind: int) -> _Nodes:
        """Check that *pages* are of *kind*, and their bounds; return their nodes."""
        words = pages.view("<u2").astype(np.int64)
        own = pages[:, :8].copy().view("<u8")[:, 0]
        lower, upper = words[:, 6], words[:, 7]
        _hold(own == numbers.astype(np.uint64), "a page that says it is another")
        _hold(words[:, 5] == kind, "the kind of a page")
        _hold((lower > _HEADER_BYTES) & (lower % 2 == 0) & (lower <= upper), "the bounds of a page")
        _hold(upper <= self._psize, "the bounds of a page")
        counts = (lower - _HEADER_BYTES) // 2
        row = np.repeat(np.arange(len(pages)), counts)
        slot = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        at = words[row, _HEADER_BYTES // 2 + slot]
        _hold(
            (at % 2 == 0) & (at >= upper[row]) & (at + _NODE_BYTES <= self._psize),
            "a node that lies outside its page",
        )
        word = at // 2
        low = words[row, word] | words[row, word + 1] << 16
        flags, key = words[row, word + 2], words[row, word + 3]
        _hold(key <= _KEY_MAX_BYTES, "the length of a key")
        return _Nodes(row, at, key, flags, low)

    def _leaves(
        self, pages: NDArray[np.uint8], nodes: _Nodes, *, keeps_values: bool
    ) -> list[bytes]:
        """Check the values of leaves, and their overflow pages; return them if *keeps_values*."""
        big = nodes.flags == _BIG
        _hold(big | (nodes.flags == 0), "the flags of a node")
        value = nodes.at + _NODE_BYTES + nodes.key
        _hold(value + np.where(big, 8, nodes.low) <= self._psize, "a value")
        found: list[bytes] = []
        for each in np.flatnonzero(big | keeps_values):
            page, start, size = pages[nodes.row[each]], int(value[each]), int(nodes.low[each])
            if big[each]:
                number = int.from_bytes(page[start : start + 8].tobytes(), "little")
                found.append(self._overflow(number, size, reads=keeps_values))
            else:
                found.append(page[start : start + size].tobytes())
        return found

    def _overflow(self, number: int, size_bytes: int, *, reads: bool) -> bytes:
        """Check the overflow pages from *number* on; return the value if *reads*, else b""."""
        if not 2 <= number < self._count:
            raise _broken("the number of an overflow page")
        header = self._pages[number, :_HEADER_BYTES].tobytes()
        flags = int.from_bytes(header[10:12], "little")
        pages = int.from_bytes(header[12:16], "little")
        needed = -(-(_HEADER_BYTES + size_bytes) // self._psize)
        if (
            int.from_bytes(header[:8], "little") != number
            or flags != _OVERFLOW
            or not needed <= pages <= self._count - number
        ):
            raise _broken("an overflow page")
        self._use(np.arange(number, number + pages, dtype=np.int64))
        start = number * self._psize + _HEADER_BYTES
        return self._bytes[start : start + size_bytes].tobytes() if reads else b""

    def _free_list(self, value: bytes) -> None:
        """Check one list of free pages (MDB_IDL): its length, and that no page is in use."""
        numbers: NDArray[Any] = np.frombuffer(value, dtype="<u8", count=len(value) // 8)
        if not len(numbers) or int(numbers[0]) + 1 > len(numbers):
            raise _broken("the length of a list of free pages")
        free = numbers[1 : int(numbers[0]) + 1]
        inside = free[free < np.uint64(self._count)].astype(np.int64)
        _hold(inside >= 2, "the number of a free page")
        _hold(~self._used[inside], "a page that is in use and free")


def _hold(right: NDArray[np.bool_], what: str) -> None:
    if not right.all():
        raise _broken(what)


def _broken(what: str) -> IndexDamaged:
    return IndexDamaged(f"index: a broken page: {what} is wrong")
