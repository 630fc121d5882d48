"""The changes that a client of a soak makes to its names."""

import contextlib
import os

from tests.support.kills.soak.blocks import ALIGNED, closing, write_all
from tests.support.kills.soak.kept import KeptWriter
from tests.support.kills.soak.owner import Fault, Owner, Superseded
from tests.support.kills.soak.table import NOTHING, Found, hides_drafts, path_of


class Changes(Owner):
    """Stores, rewrites, cuts, renames and removes."""

    #: The share of stores that go by direct I/O.
    direct_share = 0.5

    def store(self) -> None:
        """Store under a temporary name and rename."""
        number = self.picked()
        if not self.is_free(number):
            return
        meant = self.new()
        path = path_of(self.args.root, number)
        temporary = f"{path}.{self.args.client}-{self.serial}.tmp"
        direct = meant.size_bytes % ALIGNED == 0 and self.random.random() < self.direct_share
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
        self.temporaries.add(temporary)
        with closing(os.open(temporary, flags, 0o644)) as fd:
            write_all(fd, self.blocks.made(meant.version, meant.size_bytes))
        self.rename_to(number, meant, temporary)

    def rename_to(self, number: int, meant: Found, temporary: str) -> None:
        self.begin(number, meant)
        os.rename(temporary, path_of(self.args.root, number))
        self.temporaries.remove(temporary)
        self.settle(number, meant)

    def store_in_place(self) -> None:
        """Store under the final name: anew, or over what is there (O_TRUNC)."""
        number = self.picked()
        if not self.is_free(number):
            return None
        if len(self.staying) >= self.args.staying_max:
            return self.unlink(self.staying[0])
        meant = self.new()
        # Over a block that is there, others find that block until the last close.
        shown = not hides_drafts(number) and not self.table.row(number).certain
        self.begin(number, meant, shown=shown, lossy=True)
        path = path_of(self.args.root, number)
        with closing(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)) as fd:
            write_all(fd, self.blocks.made(meant.version, meant.size_bytes))
        self.settle(number, meant, in_place=True)
        return None

    def rewrite(self) -> None:
        """Write a new version into the file that is there."""
        number = self.to_change()
        if number is None:
            return None
        meant = self.new()
        self.begin(number, meant, shown=True, lossy=True)
        try:
            fd = os.open(path_of(self.args.root, number), os.O_RDWR)
        except FileNotFoundError:
            return self.settle_missing(number)
        with closing(fd):
            data = self.blocks.made(meant.version, meant.size_bytes)
            middle = meant.size_bytes // 2
            write_all(fd, data[middle:], middle)
            write_all(fd, data[:middle])
            os.ftruncate(fd, meant.size_bytes)
        self.settle(number, meant, in_place=True)
        return None

    def truncate(self) -> None:
        """Cut a file, or make it longer by zeros."""
        number = self.to_change()
        if number is None:
            return None
        old = self.table.row(number).left
        size_bytes = max(100, self.size())
        meant = Found(old.version, size_bytes, min(old.filled_bytes, size_bytes))
        self.cut.add(old.version)
        self.begin(number, meant, shown=True, lossy=True)
        try:
            os.truncate(path_of(self.args.root, number), size_bytes)
        except FileNotFoundError:
            return self.settle_missing(number)
        self.settle(number, meant, in_place=True)
        return None

    def unlink(self, number: int | None = None) -> None:
        if number is None:
            number = self.there()
        if number is None or not self.is_free(number):
            return None
        self.begin(number, NOTHING)
        try:
            os.unlink(path_of(self.args.root, number))
        except FileNotFoundError:
            return self.settle_missing(number)
        self.settle(number, NOTHING)
        return None

    def rename_over(self) -> None:
        """Rename one of its blocks over another of its names."""
        source, target = self.there(), self.picked()
        if source is None or source == target or not self.is_free(target):
            return None
        left = self.table.row(source).left
        if left.version in self.cut:
            return None  # its header tells another size
        root = self.args.root
        self.moved.add(left.version)
        self.begin(source, NOTHING)
        self.begin(target, left)
        try:
            os.rename(path_of(root, source), path_of(root, target))
        except FileNotFoundError:
            self.note(target, self.table.row(target).left, stays=target in self.staying)
            return self.settle_missing(source)
        self.settle(source, NOTHING)
        self.settle(target, left)
        return None

    def settle_missing(self, number: int) -> None:
        """The name was not there: an evicted block, or a fault."""
        row = self.table.row(number)
        if self.table.epoch != self.epoch:
            raise Superseded
        if row.certain:
            raise Fault(f"{number} is gone: {row}")
        self.note(number, NOTHING, stays=False)

    def set_attribute(self) -> None:
        number = self.there()
        if number is None:
            return
        value = b"%d" % self.random.getrandbits(60)
        self.attributes.pop(number, None)
        with contextlib.suppress(FileNotFoundError):
            os.setxattr(path_of(self.args.root, number), "user.soak", value)
            if self.table.epoch == self.epoch:
                self.attributes[number] = value

    def write_slowly(self) -> None:
        """Have one writer open over many other calls: of a draft, or of a block that is there."""
        writer = self.writer
        if writer is None:
            return self.open_slowly()
        meant = writer.meant
        if writer.epoch != self.epoch:  # its server is dead
            self.counts["written_dead"] += 1
        try:
            writer.write_on(
                self.blocks.made(meant.version, meant.size_bytes), meant.size_bytes // 3
            )
        except OSError:
            if writer.epoch == self.table.epoch:
                raise
            writer.written_bytes = meant.size_bytes
        if writer.written_bytes < meant.size_bytes:
            return None
        self.writer = None
        if writer.epoch != self.epoch:
            return writer.let_go()
        with closing(writer.fd):
            if not writer.temporary:
                os.ftruncate(writer.fd, meant.size_bytes)
        if writer.temporary:
            self.rename_to(writer.number, meant, writer.temporary)
        self.settle(writer.number, meant, in_place=not writer.temporary)
        return None

    def open_slowly(self) -> None:
        number = self.to_change() if self.random.random() < 0.5 else None
        in_place = number is not None
        if number is None and (number := self.there()) is None:
            return None
        meant, path = self.new(), path_of(self.args.root, number)
        if not in_place:
            temporary = f"{path}.{self.args.client}-{self.serial}.tmp"
            self.temporaries.add(temporary)
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        else:
            temporary = ""
            self.begin(number, meant, shown=True, lossy=True)
            try:
                fd = os.open(path, os.O_RDWR)
            except FileNotFoundError:
                return self.settle_missing(number)
        self.writer = KeptWriter(number, meant, fd, temporary, self.epoch)
        return None
