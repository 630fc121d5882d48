"""The request that is being handled, where no channel brings any: root's, of a thread unknown."""

from collections.abc import Callable

from mount.fuse.channel import Requester


class PresentRequest:
    """Implements ``mount.files.callers.PresentRequest``."""

    present = Requester(0, 0, 0)

    def about_to_wait(self) -> Callable[[], None]:
        """Nobody else has a request meanwhile."""
        return lambda: None
