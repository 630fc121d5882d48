"""Squash: which users an NFS server maps clients' users to, and who can then store at the root.

With sec=sys a server trusts the uid that a client sends, except root's. It *squashes* root: it maps
it to the anonymous user (exports(5), "User ID Mapping"; ganesha-export-config(8), Squash).
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Self

#: The default uid and gid of the anonymous user (exports(5)); Ganesha's default is -2.
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
        """Return it from `kvfs status`; None if the server is too old to show it."""
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
    """Which users become the anonymous user, and its ids."""

    kind: str
    uid: int = NOBODY_ID
    gid: int = NOBODY_ID

    def lets_root_store(self, root: Root) -> bool:
        """Whether the root of a client can store."""
        return self.kind == NONE or root.lets_store(self.uid, self.gid)

    def lets_somebody_store(self, root: Root) -> bool:
        """Whether any user of a client can store: its root, or a user whose uid is trusted."""
        if self.lets_root_store(root):
            return True
        if self.kind == ALL:
            return False
        # A user of the owner's uid, one in its group, any other; root and group 0 are squashed.
        believed = [(root.uid, -1), (-1, root.gid), (-1, -1)]
        return any(root.lets_store(uid, gid) for uid, gid in believed if uid != 0 and gid != 0)


def fitting(root: Root, kind: str = "") -> Squash:
    """Return the squash that trusts clients least and still lets their root store.

    *kind* is what the operator asked for; it is returned if anybody can store with it.
    """
    if kind == NONE:
        return Squash(NONE)
    group = root.gid or NOBODY_ID
    for uid, gid in ((NOBODY_ID, NOBODY_ID), (NOBODY_ID, group), (root.uid, group)):
        if uid != 0 and root.lets_store(uid, gid):
            return Squash(kind or ROOT, uid, gid)
    return Squash(NONE)  # only root can store, so root must not be squashed
