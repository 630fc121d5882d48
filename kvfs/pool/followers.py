"""Followers of the pool's changes: each table that must agree with the index.

After its commit a change hands over what it did, to each follower in turn. Tables are updated in no
other way (tests/engine/test_followers.py).
"""

import logging
from collections.abc import Callable
from typing import Final, Protocol

from kvfs.core.changed import Changed, Why

_log: Final = logging.getLogger(__name__)
_Follow = Callable[[Changed], None]


class Follower(Protocol):
    """A table that must be told of changes."""

    @property
    def follows(self) -> frozenset[Why]:
        """The kinds of changes that it must be told of."""

    def follow(self, changed: Changed) -> None:
        """Update the table for *changed*, which is in the index already."""


class Followers:
    """All followers of one pool, in the order in which they are told."""

    def __init__(self, *followers: Follower) -> None:
        self._of: tuple[tuple[_Follow, ...], ...] = tuple(
            tuple(each.follow for each in followers if why in each.follows) for why in Why
        )
        #: How often a follower raised; the log says why.
        self.failures = 0

    def tell(self, changed: Changed) -> None:
        """Hand *changed* to all. A failure fails no request, since the index is right already."""
        for follow in self._of[changed.why]:
            try:
                follow(changed)
            except Exception:
                self.failures += 1
                _log.exception("inode %#x: not followed (%s)", changed.ino, changed.why.name)
