"""What a client of a soak looks at, and what it must find."""

import contextlib
import os
from collections import Counter

from tests.support.kills.soak.blocks import closing, read_all
from tests.support.kills.soak.kept import Kept
from tests.support.kills.soak.owner import STAYS, Fault, Owner, Superseded
from tests.support.kills.soak.table import ABSENT, NOTHING, Row, path_of


class Looks(Owner):
    """Loads, lists, and finds out what a killed server has left."""

    def load(self, number: int | None = None) -> Row | None:
        """Load a block and check every byte; keep it open at times."""
        if number is None:
            number = self.random.randrange(self.table.names)
        path = path_of(self.args.root, number)
        before, epoch = self.table.row(number), self.table.epoch
        direct = self.random.random() < 0.2
        keep = self.random.random() < 0.15
        try:
            fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        except FileNotFoundError:
            self.judge_missing(number, before, epoch)
            return before
        try:
            data = read_all(fd, direct=direct)
            after = self.table.row(number)
            self.counts["loads"] += 1
            if before.tells_nothing_until(after):
                self.counts["loads_unjudged"] += 1
                return None
            complaint = self.blocks.judged(data, before, after)
            if complaint:
                raise Fault(
                    f"load of {number}{' direct' if direct else ''}: {complaint};"
                    f" {before} {after}, epoch {epoch} to {self.table.epoch}"
                )
            if keep and before == after and before.quiet and not direct and data:
                kept = Kept(number, fd, before.left, before.begun, epoch)
                fd = -1
                self.shelf.keep(kept)
                if self.random.random() < 0.5:
                    kept.map()
        finally:
            if fd >= 0:
                os.close(fd)
        return before

    def judge_missing(self, number: int, before: Row, epoch: int) -> None:
        after = self.table.row(number)
        self.counts["misses"] += 1
        if epoch % 2 or self.table.epoch != epoch or not before.certain:
            return
        if before.may_be_lost(epoch):
            return
        if before.tells_nothing_until(after) or ABSENT in before.versions_until(after):
            return
        if before == after or not self.args.full:
            raise Fault(f"{number} is gone: {before} {after} in epoch {epoch}")

    def check_attribute(self) -> None:
        if not self.attributes:
            return
        number = self.random.choice(sorted(self.attributes))
        value = self.attributes[number]
        row = self.table.row(number)
        try:
            found = os.getxattr(path_of(self.args.root, number), "user.soak")
        except FileNotFoundError:
            if row.certain and self.table.epoch == self.epoch:
                raise Fault(f"{number} is gone: {row}") from None
            self.attributes.pop(number)
            return
        self.counts["attributes"] += 1
        if found != value:
            raise Fault(f"user.soak of {number} is {found!r}, not {value!r}: {row}")

    def list_names(self) -> None:
        directory = self.random.randrange(4)
        numbers = range(directory, self.table.names, 4)
        before = {number: self.table.row(number) for number in numbers}
        listed = Counter(os.listdir(f"{self.args.root}/{directory}"))
        after = {number: self.table.row(number) for number in numbers}
        if self.table.epoch != self.epoch:
            return
        self.counts["lists"] += 1
        for number in numbers:
            row = before[number]
            if row != after[number] or not row.quiet:
                continue
            times = listed[f"{number:06d}.kv"]
            if times > 1 or (times == 0 and row.certain):
                raise Fault(f"{number} is listed {times} times: {row}")
            if times and row.left == NOTHING:
                raise Fault(f"{number} is listed and was removed: {row}")

    def look_at_kept(self) -> None:
        if self.shelf.kept and (wrong := self.shelf.look(self.random.choice(self.shelf.kept))):
            raise Fault(wrong)

    def recover(self) -> None:
        """Look what is left of the changes that a server's end cut off."""
        writer = self.writer
        for temporary in sorted(self.temporaries):
            if writer and writer.temporary == temporary and writer.epoch == self.epoch:
                continue
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            self.temporaries.remove(temporary)
        for number in self.own:
            if not self.table.row(number).quiet and self.is_free(number):
                self.recover_name(number)

    def recover_name(self, number: int) -> None:
        row, path = self.table.row(number), path_of(self.args.root, number)
        meant, lossy = self.meant.get(number, (row.left, False))
        try:
            with closing(os.open(path, os.O_RDONLY)) as fd:
                data = read_all(fd)
            stays = self.wait_closed(path) in STAYS
        except FileNotFoundError:
            if self.table.epoch != self.epoch:
                raise Superseded from None
            if not (lossy or self.args.full or NOTHING in (row.left, meant)):
                raise Fault(f"{number} is gone with its server: {row}, {meant}") from None
            self.counts["recovered_missing"] += 1
            return self.note(number, NOTHING, stays=False)
        if self.table.epoch != self.epoch:
            raise Superseded
        for found in (meant, row.left):
            if found != NOTHING and self.blocks.complaint(data, found) is None:
                self.counts["recovered_new" if found is meant else "recovered_old"] += 1
                return self.note(number, found, stays=stays)
        raise Fault(
            f"{number} is neither old nor new: {self.blocks.complaint(data, row.left)};"
            f" {self.blocks.complaint(data, meant)}; {row}, lossy {lossy}"
        )
