"""Whom an NFS server takes its clients for, and who of them can then store at the mount's root.

With sec=sys a server believes the uid that a client sends, but for root's, which it *squashes*: it
takes it for the anonymous user (exports(5), "User ID Mapping"; ganesha-export-config(8), Squash).
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Self

#: Of nobody and nogroup, where nothing else is said (exports(5)); Ganesha says -2.
NOBODY_ID: Final = 65534
#: Write and search, in each of the three digits of a mode (inode(7)).
_STORE: Final = 0o3

ROOT, ALL, NONE = "root", "all", "none"
KINDS: Final = (ROOT, ALL, NONE)


class Root(NamedTuple):
    """Who may store at the root of a mount."""

    uid: int
    gid: int
    mode: int
    """The permission bits."""

    @classmethod
    def of_status(cls, status: Mapping[str, Any]) -> Self | None:
        """Return what `kvfs status` says; None of a server that is too old to say it."""
        said = status.get("root")
        if not isinstance(said, dict):
            return None
        return cls(int(said["uid"]), int(said["gid"]), int(str(said["mode"]), 8))

    def lets_store(self, uid: int, gid: int) -> bool:
        """Whether a process of *uid* and *gid* may make names here (path_resolution(7))."""
        if uid == 0:
            return True
        shift = 6 if uid == self.uid else 3 if gid == self.gid else 0
        return self.mode >> shift & _STORE == _STORE


class Squash(NamedTuple):
    """Who is taken for the anonymous user, and who that is."""

    kind: str
    uid: int = NOBODY_ID
    gid: int = NOBODY_ID

    def lets_root_store(self, root: Root) -> bool:
        """Whether the root of a client can store."""
        return self.kind == NONE or root.lets_store(self.uid, self.gid)

    def lets_somebody_store(self, root: Root) -> bool:
        """Whether any user of a client can store: its root, or a user whom the server believes."""
        if self.lets_root_store(root):
            return True
        if self.kind == ALL:
            return False
        # A user of the owner's uid, one in its group, any other; root and group 0 are squashed.
        believed = [(root.uid, -1), (-1, root.gid), (-1, -1)]
        return any(root.lets_store(uid, gid) for uid, gid in believed if uid != 0 and gid != 0)


def fitting(root: Root, kind: str = "") -> Squash:
    """Return the squash with which the root of a client can store, as little trusted as possible.

    *kind* is what somebody asks for, and what comes back if anybody could store with it.
    """
    if kind == NONE:
        return Squash(NONE)
    group = root.gid or NOBODY_ID
    for uid, gid in ((NOBODY_ID, NOBODY_ID), (NOBODY_ID, group), (root.uid, group)):
        if uid != 0 and root.lets_store(uid, gid):
            return Squash(kind or ROOT, uid, gid)
    return Squash(NONE)  # nobody but root can store, so that root must not be squashed
