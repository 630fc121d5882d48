"""The durability of all that was published: a pass for each drive, and those who wait for all.

No drive's pass waits for another's (drive_pass.py): while one does not answer, the blocks of the
others become durable. Who waits for everything, a sync say, waits for each of them.
"""

import errno
from typing import Any, Final

from kvfs.core.durable_pace import DurableGoal
from kvfs.engine.blocks.moves import Moves
from kvfs.engine.blocks.publishing import Publishing
from kvfs.engine.durability.drive_pass import DrivePass
from kvfs.pool.pool import Pool


class DurablePass:
    """The passes of one pool. Everything but their threads' work runs on the loop's thread."""

    def __init__(self, pool: Pool, publishing: Publishing, moves: Moves) -> None:
        self._pool = pool
        self._moves = moves
        self._queue = pool.durable.not_durable
        self._attributes = pool.durable.identities.attributes
        self._passes: Final = [DrivePass(pool, publishing, each) for each in pool.space.drives.all]
        pool.ends_first(self.close)

    def run_due(self, now_s: float) -> None:
        """Go on with what is due; some microseconds if nothing is."""
        for each in self._serving():
            each.run_due(now_s)

    def _serving(self) -> list[DrivePass]:
        return [each for each in self._passes if not each.drive.has_failed]

    # ---- those who wait ----

    def goal(self) -> DurableGoal:
        """Return a goal: all that is published by now is durable, with all names as they are now.

        While the list has gaps it is set later, when a search has filled them. Raises NoSpace,
        OSError.
        """
        goal = DurableGoal(self._queue.gaps, self._losses, self._moves.order_whole())
        self._set(goal)
        return goal

    def _set(self, goal: DurableGoal) -> None:
        """Set *goal* to now, unless it is set already, or the list has gaps. Atomic."""
        if goal.is_set or self._queue.closed_gaps < goal.gaps:
            return
        if not (self._moves.have_ended(goal.moves) and self._are_written(goal)):
            return
        self._pool.index.settle()
        for queue in self._queue.queues.all:
            queue.look_again(queue.held)
        goal.flushes = tuple(each.want_flush() for each in self._passes)
        goal.ticket, goal.attributes = self._queue.ticket, self._attributes.ticket

    def _are_written(self, goal: DurableGoal) -> bool:
        """Whether queued identities, of directories and of what was renamed, are written."""
        background = self._pool.background
        while goal.rounds:
            devices = [threads.device for threads in background.drives.all]
            if not goal.upto:
                background.hurry()
                goal.upto = tuple(device.submitted for device in devices)
            if any(device.ended < upto for device, upto in zip(devices, goal.upto, strict=True)):
                return False
            goal.rounds, goal.upto = goal.rounds - 1, ()
        return True

    def undone(self, goal: DurableGoal) -> int:
        """Return how many blocks and attributes *goal* still waits for, and work towards it.

        Raises NoSpace, OSError.
        """
        now_s = self._pool.monotonic_s()
        for each in self._serving():
            each.ask(now_s)
        self._set(goal)
        self.run_due(now_s)
        blocks = sum(1 for _ in self._queue.undone(goal.ticket))
        return blocks + self._attributes.undone(goal.attributes)

    def is_flushed(self, goal: DurableGoal) -> bool:
        """Whether each drive that serves was flushed since *goal* was set."""
        wanted = zip(self._passes, goal.flushes, strict=goal.is_set)
        return goal.is_set and all(
            each.flushes >= flush or each.drive.has_failed for each, flush in wanted
        )

    def reached(self, goal: DurableGoal) -> bool:
        """Whether *goal* is reached; works towards it.

        Raises OSError if the device failed, NoSpace.
        """
        undone = self.undone(goal)
        if self._losses > goal.losses:
            raise OSError(errno.EIO, "the device failed to write a block, or attributes")
        if undone or not self.is_flushed(goal):
            return False
        for each in self._passes:
            each.rest()  # other callers that wait ask again
        return True

    @property
    def _losses(self) -> int:
        """Failures so far: of the device, blocks lost otherwise (device_errors.py), attributes that
        were refused, and failed searches for what is not durable.
        """
        losses = self.failures + self._pool.lost_blocks + self._attributes.refused
        return losses + self._queue.failed_searches

    # ---- the end ----

    def close(self) -> None:
        """Wait for the threads, and put their blocks back. Identities that were written stay."""
        for each in self._passes:
            each.close()

    @property
    def failures(self) -> int:
        """How often a drive failed to write a block, or to flush."""
        return sum(each.failures for each in self._passes)

    def checksum_counts(self) -> dict[str, Any]:
        """Return how many blocks got a checksum, and how many did not, for `kvfs status`."""
        at_once = self._pool.durable.final_bytes
        return {
            "made": sum(each.checksums for each in self._passes) + at_once.checksums,
            "unchecked": sum(each.unchecked for each in self._passes) + at_once.unchecked,
        }

    def describe(self) -> dict[str, Any]:
        """Return the figures `kvfs status` shows."""
        queue, attributes = self._queue, self._attributes
        waiting = (queue.oldest_since_s(), attributes.oldest_since_s())
        now_s = self._pool.monotonic_s()
        oldest_s = max((now_s - since_s for since_s in waiting if since_s is not None), default=0.0)
        return {
            "within_s": self._pool.settings.durable_within_s,
            "blocks": len(queue),
            "bytes": queue.size_bytes,
            "oldest_s": round(max(0.0, oldest_s), 1),
            "held_blocks": queue.held,
            "unlisted": queue.left_out,
            "marked": sum(each.marked for each in self._passes),
            "late": sum(each.late for each in self._passes),
            "flushes": sum(each.flushes for each in self._passes),
            "failures": self.failures,
            "attributes": len(attributes),
            "attributes_refused": attributes.refused,
        }
