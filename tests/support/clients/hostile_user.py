"""One user who takes what all need, in every way there is, in random order, until stdin ends.

``python -m tests.support.clients.hostile_user FOLDER UID SEED``. What it does is refused often; it
counts how each act ended by errno, and prints the counts as JSON at the end.
"""

import contextlib
import errno
import json
import mmap
import os
import random
import select
import sys
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

BLOCK_BYTES: Final = 1 << 20
CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL
#: What one holds at most: many more than the pool has blocks.
HELD_MAX: Final = 400
#: Every so often all that is held is let go, so that taking begins anew.
LET_GO_OF: Final = 40


class HostileUser:
    """Its acts; each takes something and keeps it, or has the pool give something up."""

    def __init__(self, folder: Path, uid: int, seed: str) -> None:
        self._folder, self._uid, self._rng = folder, uid, random.Random(f"{seed}-{uid}")
        #: Of its names: those of an earlier run may be there.
        self._seed = seed
        self._held: deque[int] = deque()
        self._mapped: deque[mmap.mmap] = deque()
        self._number = 0
        self.done: Counter[str] = Counter()

    def _name(self, kind: str) -> Path:
        self._number += 1
        return self._folder / f"{kind}-{self._uid}-{self._seed}-{self._number}"

    def _hold(self, fd: int) -> None:
        self._held.append(fd)
        if len(self._held) > HELD_MAX:
            self._close(self._held.popleft())

    def _close(self, fd: int) -> None:
        """Close; a draft that had no room says so here, and is closed all the same."""
        with contextlib.suppress(OSError):
            os.close(fd)

    def _stored(self, path: Path) -> Path:
        fd = os.open(path.with_suffix(".tmp"), CREATE, 0o644)
        try:
            os.write(fd, bytes(BLOCK_BYTES))
        finally:
            os.close(fd)
        os.rename(path.with_suffix(".tmp"), path)
        return path

    def drafts(self) -> None:
        """Leave drafts open."""
        for _ in range(self._rng.randrange(1, 30)):
            self._hold(fd := os.open(self._name("draft").with_suffix(".tmp"), CREATE, 0o644))
            os.write(fd, bytes(BLOCK_BYTES))

    def growing(self) -> None:
        """Let one draft grow as far as it goes."""
        self._hold(fd := os.open(self._name("grown").with_suffix(".tmp"), CREATE, 0o644))
        for _ in range(self._rng.randrange(1, 60)):
            os.write(fd, bytes(BLOCK_BYTES))

    def readers(self) -> None:
        """Open all blocks of others, and keep them."""
        for name in os.listdir(self._folder):
            self._hold(os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW))

    def nameless(self) -> None:
        """Keep blocks without a name."""
        for _ in range(self._rng.randrange(1, 20)):
            path = self._stored(self._name("gone"))
            self._hold(os.open(path, os.O_RDONLY))
            os.unlink(path)

    def versions(self) -> None:
        """Rewrite one name, and keep each old version open."""
        path = self._folder / f"version-{self._uid}"
        for _ in range(self._rng.randrange(1, 140)):
            self._stored(path)
            self._hold(os.open(path, os.O_RDONLY))

    def flood(self) -> None:
        """Store a third of a pool."""
        for _ in range(self._rng.randrange(1, 40)):
            self._stored(self._name("flood"))

    def slabs(self) -> None:
        """Allocate ahead."""
        self._hold(fd := os.open(self._name("slab"), CREATE, 0o644))
        os.posix_fallocate(fd, 0, self._rng.randrange(1, 40) * BLOCK_BYTES)

    def leases(self) -> None:
        """Lease blocks."""
        for _ in range(self._rng.randrange(1, 30)):
            os.setxattr(self._stored(self._name("lease")), b"user.kvfs.lease", b"1")

    def pins(self) -> None:
        """Pin blocks."""
        for _ in range(self._rng.randrange(1, 30)):
            os.setxattr(self._stored(self._name("pin")), b"user.kvfs.pin", b"1")

    def names(self) -> None:
        """Make directories and symlinks with long names."""
        for _ in range(self._rng.randrange(1, 200)):
            os.symlink("x" * 1000, self._name("n" * 150))
            os.mkdir(self._name("d" * 150))

    def maps(self) -> None:
        """Map blocks and close them."""
        for name in os.listdir(self._folder)[:50]:
            fd = os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                if os.fstat(fd).st_size:  # an empty one cannot be mapped
                    self._mapped.append(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
            finally:
                os.close(fd)

    def looks(self) -> None:
        """Look for what nobody has stored."""
        for _ in range(1000):
            assert not self._name("absent").exists()

    def let_go(self) -> None:
        """Close and unmap all."""
        while self._held:
            self._close(self._held.pop())
        while self._mapped:
            self._mapped.pop().close()

    def acts(self) -> list[Callable[[], None]]:
        """Return all but ``let_go``."""
        return [
            *(self.drafts, self.growing, self.readers, self.nameless, self.versions, self.flood),
            *(self.slabs, self.leases, self.pins, self.names, self.maps, self.looks),
        ]

    def act(self) -> None:
        """Do one act, and count how it ended."""
        act = self._rng.choice(self.acts())
        if not self._rng.randrange(LET_GO_OF):
            self.let_go()
        try:
            act()
            how = "done"
        except OSError as error:
            how = errno.errorcode.get(error.errno or 0, str(error))
            if error.errno == errno.EMFILE and len(self._held) > HELD_MAX // 2:
                self.let_go()
        self.done[f"{act.__name__} {how}"] += 1


def main() -> None:
    """Act until stdin ends."""
    folder, uid, seed = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    user = HostileUser(folder, uid, seed)
    while not select.select([sys.stdin], [], [], 0)[0]:
        user.act()
    user.let_go()
    print(json.dumps(dict(sorted(user.done.items()))))


if __name__ == "__main__":
    main()
