"""A writer of self-proving blocks, in the ways of connectors.

It notes each store in a ledger: before the first call what the block will be, after the last one
that it was acknowledged. Between the calls the "kernel" writes back (writing_kernel.py).
"""

import contextlib
import errno
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from tests.support.devices.power_cuts.ledger import (
    LINKED,
    TEMPORARY,
    Attribute,
    Block,
    Directory,
    Ledger,
    Listing,
    Publication,
    content,
)
from tests.support.devices.power_cuts.power import write_whole
from tests.support.devices.power_cuts.proving_blocks import SECTOR_BYTES, sectors_of
from tests.support.devices.power_cuts.writing_kernel import PAGE_BYTES, Kernel

#: LMCache's header, which it writes apart from the payload.
HEADER_BYTES: Final = 28
_SIZES_BYTES: Final = (4096, 20_000, 65_536, 100_028, 196_608)
_BLOCKS_A_DIRECTORY: Final = 24
_LIST_EVERY: Final = 6
#: The ways of ``CutWriter``, the usual ones more often: whose blocks are published by a rename and
#: never written again, and what else is done to names.
RENAMED: Final = (
    *("store_and_rename",) * 3,
    *("store_and_link",) * 2,
    "store_direct",
    "store_header_apart",
    "rename_over",
    "unlink",
    "rename_directory",
    *("set_attribute",) * 2,
)
#: What is set: a user xattr of any size, a pin, and a policy that changes nothing here.
_ATTRIBUTES: Final = ("user.key", "user.kvfs.pin")
_POLICY: Final = "user.kvfs.ttl"
#: Those that write under the final name, or to a block that is there.
IN_PLACE: Final = (
    "store_in_place",
    "store_header_last",
    "store_by_mapping",
    "rewrite_from_empty",
    "rewrite_in_place",
    "rewrite_by_mapping",
    "append",
)


class CutWriter:
    """Stores below *root* until told to end."""

    def __init__(
        self,
        root: Path,
        kernel: Kernel,
        draw: random.Random,
        ways: Sequence[str],
        *,
        hangs: bool = False,
    ) -> None:
        """*ways* are names of the methods below.

        *hangs*: the drive may hang, and calls be refused for it (EIO).
        """
        self.ledger = Ledger()
        self._root = root
        self._kernel = kernel
        self._draw = draw
        self._hangs = hangs
        self._version = 0
        self._stores = 0
        #: Blocks that have their temporary name, too.
        self._linked: set[int] = set()
        #: Of the present step: its block, what it has opened, and the path of that.
        self._block: Block | None = None
        self._fd: int | None = None
        self._opened = ""
        #: Blocks that were refused in the middle: what they were last is not known.
        self._unsure: set[int] = set()
        self._ways: list[Callable[[], None]] = [getattr(self, way) for way in ways]

    def run(self, seconds: float, stores_per_s: float) -> None:
        """Store at a steady rate."""
        begun_s, before = time.monotonic(), self._stores
        pause = threading.Event()
        while (now_s := time.monotonic() - begun_s) < seconds:
            self.step()
            pause.wait(max(0.0, (self._stores - before) / stores_per_s - now_s))
        self.list_names()

    def step(self) -> None:
        """Do one thing, in a way that is drawn."""
        way = self._draw.choice(self._ways)
        if self._kernel.resting().locked() and way == self.store_direct:
            way = self.store_and_rename  # it would wait for the drive, and do nothing else
        self._block, self._fd, self._opened = None, None, ""
        try:
            # At first there is nothing yet to be changed.
            (way if self._stores >= _LIST_EVERY else self.store_and_rename)()
        except OSError as error:
            if not self._hangs or error.errno != errno.EIO:
                raise
            self._give_up()
        self._stores += 1
        if self._stores % _LIST_EVERY == 0:
            self.list_names()

    def _give_up(self) -> None:
        """End a step that was refused in the middle, as a program does: without what it began."""
        self.ledger.refused_calls += 1
        block, in_place = self._block, not self._opened.endswith(TEMPORARY)
        if block is None or block.publications[-1].acknowledged_ns <= time.monotonic_ns():
            return
        if self._opened:
            if not in_place:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._opened)
            if self._fd is not None:
                os.close(self._fd)
            block.spoilt = in_place
            self._unsure.add(block.number)
        elif len(block.publications) > 1:
            block.publications.pop()

    def list_names(self) -> None:
        """Note which blocks are there."""
        at_ns = time.monotonic_ns()
        found = {
            int(name)
            for directory in self.ledger.directories
            for name in os.listdir(self._root / directory.names[-1])
            if name.isdigit()
        }
        self.ledger.listings.append(Listing(at_ns, frozenset(found)))

    # ---- blocks that are new ----

    def store_and_rename(self) -> None:
        """Write all of it under a temporary name, then rename: vLLM, SGLang, Mooncake."""
        self._store_renamed("renamed", self._new_block())

    def store_and_link(self) -> None:
        """Write all of it under a temporary name, link, and remove that, at once or later."""
        block = self._new_block()
        publication, data = self._begin(block, LINKED)
        path = self._path(block)
        fd = self._create(f"{path}{TEMPORARY}", os.O_EXCL)
        self._write_halves(fd, data)
        os.link(f"{path}{TEMPORARY}", path)
        self._linked.add(block.number)
        self._kernel.may_write(fd)
        if self._draw.random() < 0.5:
            self._remove_first_name(block)
        self._close(fd, publication)
        for number in list(self._linked):
            if self._draw.random() < 0.25:
                self._remove_first_name(self.ledger.blocks[number])

    def _remove_first_name(self, block: Block) -> None:
        """Remove the temporary name of a linked block, before anything else happens to it."""
        if block.number in self._linked:
            self._linked.remove(block.number)
            with contextlib.suppress(FileNotFoundError):  # evicted
                os.unlink(f"{self._path(block)}{TEMPORARY}")

    def rename_over(self) -> None:
        """The same over a block that is there."""
        if (block := self._some_block()) is not None:
            self._store_renamed("renamed over", block)

    def store_direct(self) -> None:
        """O_DIRECT, in parts, then a rename: NIXL."""
        block = self._new_block()
        size_bytes = self._draw.choice((PAGE_BYTES, 16 * PAGE_BYTES, 40 * PAGE_BYTES))
        publication, data = self._begin(block, "direct", size_bytes=size_bytes)
        path = self._path(block)
        fd = self._create(f"{path}{TEMPORARY}", os.O_DIRECT)
        with mmap.mmap(-1, len(data)) as memory:
            memory[:] = data
            with memoryview(memory) as view:
                half = len(data) // 2 // PAGE_BYTES * PAGE_BYTES
                for start, end in ((0, half), (half, len(data))):
                    if start < end:
                        write_whole(fd, view[start:end], start)
        self._close_and_rename(fd, path, publication)

    def store_header_apart(self) -> None:
        """A small header by one write(2) and the payload by another, then a rename: LMCache."""
        block = self._new_block()
        publication, data = self._begin(block, "header apart")
        path = self._path(block)
        fd = self._create(f"{path}{TEMPORARY}")
        self._write(fd, data[:HEADER_BYTES], 0)
        self._write(fd, data[HEADER_BYTES:], HEADER_BYTES)
        self._close_and_rename(fd, path, publication)

    def store_in_place(self) -> None:
        """Under the final name at once; header and payload apart."""
        block = self._new_block()
        publication, data = self._begin(block, "in place")
        fd = self._create(self._path(block), os.O_TRUNC)
        self._write(fd, data[:HEADER_BYTES], 0)
        self._write(fd, data[HEADER_BYTES:], HEADER_BYTES)
        self._close(fd, publication)

    def store_header_last(self) -> None:
        """Room for a header, the payload, and then the header: as archives are written."""
        block = self._new_block()
        publication, data = self._begin(block, "header last")
        fd = self._create(self._path(block), os.O_TRUNC)
        self._write(fd, bytes(HEADER_BYTES) + data[HEADER_BYTES:], 0)
        self._write(fd, data[:HEADER_BYTES], 0)
        self._close(fd, publication)

    def store_by_mapping(self) -> None:
        """Its size first, then its bytes through a mapping."""
        block = self._new_block()
        publication, data = self._begin(block, "mapped")
        fd = self._create(self._path(block))
        os.ftruncate(fd, len(data))
        with mmap.mmap(fd, len(data)) as mapping:
            half = len(data) // 2
            mapping[:half] = data[:half]
            self._kernel.may_write(fd)
            mapping[half:] = data[half:]
        self._close(fd, publication)

    # ---- blocks that are there already ----

    def rewrite_from_empty(self) -> None:
        """O_TRUNC on a block."""
        if (block := self._some_block()) is None:
            return
        publication, data = self._begin(block, "rewritten from empty")
        fd = self._create(self._path(block), os.O_TRUNC)
        self._write(fd, data, 0)
        self._close(fd, publication)

    def rewrite_in_place(self) -> None:
        """Some of its sectors get new bytes: a slab."""
        self._change("rewritten in place", by_mapping=False)

    def rewrite_by_mapping(self) -> None:
        """The same through a mapping."""
        self._change("rewritten by a mapping", by_mapping=True)

    def append(self) -> None:
        """O_APPEND: more sectors behind those that are there."""
        block = self._some_block(whole_sectors=True)
        if block is None:
            return
        last = block.publications[-1]
        self._version += 1
        versions = last.versions + (self._version,) * self._draw.randint(1, 40)
        publication, data = self._begin(block, "appended", versions=versions)
        if (fd := self._open(block, os.O_WRONLY | os.O_APPEND)) is not None:
            write_whole(fd, data[last.size_bytes :], last.size_bytes)
            self._kernel.may_write(fd)
            self._close(fd, publication)

    def unlink(self) -> None:
        """Remove one."""
        block = self._some_block()
        if block is not None and self._draw.random() < 0.5:
            self._remove_first_name(block)
            block.disturbed_ns.append(time.monotonic_ns())
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(block))

    def rename_directory(self) -> None:
        """Rename a directory with all that is in it."""
        if self._draw.random() < 0.5:
            directory = self._draw.choice(self.ledger.directories)
            name = f"{directory.names[0]}-{len(directory.names)}"
            directory.names.append(name)
            os.rename(self._root / directory.names[-2], self._root / name)
            self._kernel.force_log()

    def set_attribute(self) -> None:
        """Set a xattr, a pin or a policy, or remove it."""
        of: Block | Directory | None = self._draw.choice(self.ledger.directories)
        name = _POLICY
        if self._draw.random() < 0.7:
            of, name = self._some_block(), self._draw.choice(_ATTRIBUTES)
        if of is None:
            return
        self._version += 1
        value = b"%dh" % self._version
        if name == "user.key":
            value = b"%d" % self._version * self._draw.choice((1, 1, 200, 900))
        elif name == "user.kvfs.pin":
            value = self._draw.choice((b"1", b"0"))
        change = Attribute(of, name, value, time.monotonic_ns())
        path = f"{self._root}/{of.names[-1]}" if isinstance(of, Directory) else self._path(of)
        try:
            if self._draw.random() < 0.25:
                change.value = None
                os.removexattr(path, name)
            else:
                os.setxattr(path, name, value)
        except OSError as error:  # evicted, or there was none to remove
            if error.errno == errno.EIO:  # it may be set for all that
                self.ledger.attributes.append(change)
            return
        change.acknowledged_ns = time.monotonic_ns()
        self.ledger.attributes.append(change)
        if self._draw.random() < 0.5:
            self._kernel.force_log()

    # ---- the steps of these ----

    def _new_block(self) -> Block:
        if len(self.ledger.blocks) % _BLOCKS_A_DIRECTORY == 0:
            name = f"d{len(self.ledger.directories)}"
            os.mkdir(self._root / name)
            self.ledger.directories.append(Directory([name], time.monotonic_ns()))
        block = Block(len(self.ledger.blocks), len(self.ledger.directories) - 1)
        self.ledger.blocks.append(block)
        return block

    def _some_block(self, *, whole_sectors: bool = False) -> Block | None:
        """Return one that was there at the last listing."""
        if not self.ledger.listings:
            return None
        numbers = self.ledger.listings[-1].blocks - self._unsure
        there = [self.ledger.blocks[number] for number in numbers]
        if whole_sectors:
            there = [
                block for block in there if block.publications[-1].size_bytes % SECTOR_BYTES == 0
            ]
        return self._draw.choice(sorted(there, key=lambda block: block.number)) if there else None

    def _begin(
        self,
        block: Block,
        way: str,
        *,
        size_bytes: int | None = None,
        versions: tuple[int, ...] = (),
    ) -> tuple[Publication, bytes]:
        """Note what *block* will be; a block that is there is disturbed from now on."""
        if not versions:
            self._version += 1
            if size_bytes is None:
                size_bytes = self._draw.choice(_SIZES_BYTES)
            versions = (self._version,) * sectors_of(size_bytes)
        elif size_bytes is None:
            size_bytes = len(versions) * SECTOR_BYTES
        self._remove_first_name(block)
        now_ns = time.monotonic_ns()
        if block.publications:
            block.disturbed_ns.append(now_ns)
        publication = Publication(way, versions, size_bytes, now_ns)
        block.publications.append(publication)
        self._block = block
        return publication, content(block.number, versions, size_bytes)

    def _store_renamed(self, way: str, block: Block) -> None:
        publication, data = self._begin(block, way)
        path = self._path(block)
        begun_ns = time.monotonic_ns()
        fd = self._create(f"{path}{TEMPORARY}")
        self._write_halves(fd, data)
        self._close_and_rename(fd, path, publication)
        if len(block.publications) > 1:  # its attributes went with the one that it replaced
            done_ns = publication.acknowledged_ns
            for name in _ATTRIBUTES:
                self.ledger.attributes.append(Attribute(block, name, None, begun_ns, done_ns))

    def _change(self, way: str, *, by_mapping: bool) -> None:
        block = self._some_block()
        if block is None:
            return
        last = block.publications[-1]
        first = self._draw.randrange(len(last.versions))
        count = self._draw.randint(1, len(last.versions) - first)
        self._version += 1
        behind = last.versions[first + count :]
        versions = last.versions[:first] + (self._version,) * count + behind
        publication, data = self._begin(block, way, size_bytes=last.size_bytes, versions=versions)
        begin, end = first * SECTOR_BYTES, min((first + count) * SECTOR_BYTES, last.size_bytes)
        if (fd := self._open(block, os.O_RDWR)) is not None:
            if by_mapping:
                with mmap.mmap(fd, last.size_bytes) as mapping:
                    mapping[begin:end] = data[begin:end]
                    self._kernel.may_write(fd)
            else:
                self._write(fd, data[begin:end], begin)
            self._close(fd, publication)

    def _open(self, block: Block, flags: int) -> int | None:
        """Open one that is there; if it was evicted, it was not published anew either."""
        try:
            self._fd = os.open(self._path(block), flags)
        except FileNotFoundError:
            block.publications.pop()
            return None
        self._opened = self._path(block)
        return self._fd

    def _create(self, path: str, more_flags: int = 0) -> int:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | more_flags, 0o644)
        self._opened = path
        return self._fd

    def _write_halves(self, fd: int, data: bytes) -> None:
        for start, end in ((0, len(data) // 2), (len(data) // 2, len(data))):
            self._write(fd, data[start:end], start)

    def _write(self, fd: int, data: bytes, at: int) -> None:
        write_whole(fd, data, at)
        self._kernel.may_write(fd)

    def _close(self, fd: int, publication: Publication) -> None:
        self._fd = None
        os.close(fd)
        publication.acknowledged_ns = time.monotonic_ns()

    def _close_and_rename(self, fd: int, path: str, publication: Publication) -> None:
        self._fd = None
        os.close(fd)
        os.rename(f"{path}{TEMPORARY}", path)
        publication.acknowledged_ns = time.monotonic_ns()
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY)
            self._kernel.may_write(fd)
            os.close(fd)

    def _path(self, block: Block) -> str:
        return f"{self._root}/{self.ledger.directories[block.directory].names[-1]}/{block.name}"
