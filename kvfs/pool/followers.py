"""What follows the changes of the pool: each table that must agree with the index.

A change hands over what it did after its commit, to each in turn. Nobody else tells a table
anything (tests/engine/test_followers.py).
"""

import logging
from collections.abc import Callable
from typing import Final, Protocol

from kvfs.core.changed import Changed, Why

_log: Final = logging.getLogger(__name__)
_Follow = Callable[[Changed], None]


class Follower(Protocol):
    """Something that must know of changes."""

    @property
    def follows(self) -> frozenset[Why]:
        """Those that it must know of."""

    def follow(self, changed: Changed) -> None:
        """Do what *changed*, which is in the index by now, asks of it."""


class Followers:
    """All followers of one pool, in the order in which they are told."""

    def __init__(self, *followers: Follower) -> None:
        self._of: tuple[tuple[_Follow, ...], ...] = tuple(
            tuple(each.follow for each in followers if why in each.follows) for why in Why
        )
        #: Changes that one of them could not follow; the log says why.
        self.failures = 0

    def tell(self, changed: Changed) -> None:
        """Hand *changed* to all. One that fails costs no request: the index is right already."""
        for follow in self._of[changed.why]:
            try:
                follow(changed)
            except Exception:
                self.failures += 1
                _log.exception("inode %#x: not followed (%s)", changed.ino, changed.why.name)
