"""Why a block was evicted, as `kvfs status` and the metrics name it."""

from enum import StrEnum

from kvfs.core.lifecycle import State


class Reason(StrEnum):
    """What asked for an eviction."""

    #: A store needed the space, or would soon.
    SPACE = "space"
    #: ``kvfs evict``.
    COMMAND = "command"
    #: The index or the device takes no more names.
    NAMES = "names"
    #: Unused for longer than the policy ``ttl`` of its directory.
    TTL = "ttl"
    #: A temporary file whose writer is gone. It is evicted first, whatever the space is for.
    ORPHAN = "orphan"


def reason_for(state: int, asked: Reason) -> Reason:
    """Return the reason to report for a block in *state* that is evicted because of *asked*."""
    if asked is Reason.SPACE and state == State.ORPHAN:
        return Reason.ORPHAN
    return asked
