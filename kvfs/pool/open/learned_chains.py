"""Chains learned from loads, and the blocks read ahead by them; what goes is dropped from both."""

from typing import Final

from kvfs.core.blocks_ahead import BlocksAhead
from kvfs.core.chains import Chains
from kvfs.core.changed import Changed, Why


class LearnedChains:
    """Those of one pool. In memory only: a restart or a take-over learns anew."""

    follows: Final = frozenset({Why.REOPENED, Why.REPLACED, Why.REMOVED, Why.LOST, Why.EVICTED})

    def __init__(self) -> None:
        self.links: Final = Chains()
        self.ahead: Final = BlocksAhead()

    def follow(self, changed: Changed) -> None:
        """Forget a block that is gone, or is written again."""
        self.links.drop(changed.ino)
        self.ahead.drop(changed.ino)
