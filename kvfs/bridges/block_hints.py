"""What the bridges have in common: the hints of one tier, from wishes for files to the socket.

It asks the kernel's list of mounts and never the mount itself, whose server may hang.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from kvfs.bridges.envelope import BlockWish
from kvfs.bridges.hint_sender import HintSender, SentHints
from kvfs.core.hints import Do
from kvfs.core.mount_name import hints_path, name_of
from kvfs.machine.mount_table import FS_TYPE, mount_of, mounts, resolve_mountpoint

_log: Final = logging.getLogger(__name__)

#: Blocks whose wishes are remembered: of more the oldest go.
WISHES_MAX: Final = 1 << 16


class HintedPlace(NamedTuple):
    """A directory as a client of the hints socket speaks of it."""

    #: Of the directory, below the mountpoint, with a slash at the beginning and none at the end.
    name: str
    socket: str


def place_of(directory: str, socket: str = "") -> HintedPlace | None:
    """Return the place of *directory*; None if no kvfs serves it, or it cannot be told.

    *socket* overrides the usual one: for a mount with a name of its own (setting ``name``), and in
    a container that sees neither ``/run/kvfs`` nor the mountpoint of the host.
    """
    try:
        resolved = resolve_mountpoint(directory)
        mount = mount_of(resolved)
        if mount is None or mount.fs_type != FS_TYPE:
            return None
        # A bind mount shows a directory of the mount at a place of its own.
        whole = [one for one in mounts() if one.device == mount.device and one.root == "/"]
    except OSError:
        return None
    below = resolved[len(mount.mountpoint) :] if mount.mountpoint != "/" else resolved
    name = f"{mount.root.rstrip('/')}/{below.strip('/')}".rstrip("/")
    served = whole[-1] if whole else mount
    return HintedPlace(name, socket or hints_path(name_of(served.mountpoint)))


class LaterWishes:
    """What messages asked for blocks that may be stored later. Several threads may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: OrderedDict[str, tuple[object, BlockWish]] = OrderedDict()

    def remember(
        self, message: object, wishes: Iterable[tuple[str, BlockWish]]
    ) -> list[tuple[str, BlockWish]]:
        """Keep the *wishes* of *message* for blocks by name; return those that are new."""
        new: list[tuple[str, BlockWish]] = []
        with self._lock:
            for name, wish in wishes:
                if self._of.get(name) == (message, wish):
                    continue
                self._of[name] = message, wish
                self._of.move_to_end(name)
                new.append((name, wish))
            while len(self._of) > WISHES_MAX:
                self._of.popitem(last=False)
        return new

    def of(self, name: str) -> BlockWish | None:
        """Return what was asked for the block last; None: nothing that is remembered."""
        found = self._of.get(name)
        return None if found is None else found[1]


class BlockHints:
    """Hints for the files of a tier below *directory*."""

    def __init__(self, directory: str, socket: str | None = None) -> None:
        """*socket* overrides the hints socket of the mount in which *directory* lies."""
        self._directory = directory
        self._place = place_of(directory, socket or "")
        self._sender: HintSender | None = None
        #: Actions of envelopes that nobody here knows.
        self.unknown = 0
        if self._place is None:
            _log.warning("%s is not on a kvfs mount: hints of requests are ignored", directory)
        else:
            self._sender = HintSender(self._place.socket)
            _log.info("hints go to %s", self._place.socket)

    @property
    def counts(self) -> SentHints:
        """What became of the hints."""
        return self._sender.counts if self._sender is not None else SentHints()

    def send(self, wishes: Iterable[tuple[str, BlockWish]]) -> None:
        """Send the wish of each file: its path, which begins with the directory. Never waits."""
        if self._sender is None or self._place is None:
            return
        start, root = len(self._directory.rstrip("/")), self._place.name
        together: dict[BlockWish, list[str]] = {}
        for path, wish in wishes:
            together.setdefault(wish, []).append(f"{root}/{path[start:].lstrip('/')}")
        if together:
            self._sender.send(_hint(wish, names) for wish, names in together.items())

    def close(self) -> None:
        """Hang up, and say what was done."""
        if self._sender is not None:
            self._sender.close()
            counts = self._sender.counts
            _log.info(
                "hints: %d sent, %d dropped, %d unknown", counts.sent, counts.dropped, self.unknown
            )


def _hint(wish: BlockWish, names: list[str]) -> dict[str, Any]:
    hint: dict[str, Any] = {"do": wish.do.value, "names": names}
    if wish.do is Do.RETAIN:
        hint["priority"] = wish.priority
        if wish.duration_s is not None:
            hint["duration_s"] = wish.duration_s
    return hint
