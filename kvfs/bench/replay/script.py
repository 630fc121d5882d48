"""The operator's cleaner of one side: a separate process, run by the clock of the trace."""

import select
from types import TracebackType
from typing import NamedTuple, Self

from kvfs.bench.crew import Workers, hear, tell
from kvfs.bench.replay.trace import Request

_PROGRAM = "kvfs.bench.replay.cleaner"


class Habits(NamedTuple):
    """How an operator runs it: watermarks as shares of the room, the age that counts, how often."""

    high: float = 0.9
    low: float = 0.8
    by: str = "atime"
    #: Seconds of the trace between two looks.
    look_s: float = 60.0


class Script:
    """The cleaner beside *directory*; leaving the ``with`` ends it.

    With *waits* the replay stands still until a look is over. That is how a replay as fast as it
    goes is fair to the script, whose looks would otherwise take minutes of the trace's time.
    """

    def __init__(self, directory: str, room_bytes: int, habits: Habits, *, waits: bool) -> None:
        self._waits = waits
        self._look_s = habits.look_s
        self._next_s = 0.0
        self._looking = False
        self.deleted = 0
        self.cpu_ns = 0
        shares = (str(habits.high), str(habits.low))
        self._workers = Workers(1, _PROGRAM, directory, str(room_bytes), *shares, habits.by, "-")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._workers.__exit__(kind, error, traceback)

    def before_each(self, request: Request) -> None:
        """Let it look if that is due when *request* comes. Raises ``BenchFailed``."""
        if request.at_s < self._next_s:
            return
        self._next_s = (request.at_s // self._look_s + 1) * self._look_s
        (script,) = self._workers.processes
        assert script.stdout is not None
        if self._looking and not select.select([script.stdout], [], [], 0)[0]:
            return  # an operator's timer does not start a second one beside the first
        self.finish()
        tell(script, {})
        self._looking = True
        if self._waits:
            self.finish()

    def finish(self) -> None:
        """Wait until no look is under way."""
        if self._looking:
            (script,) = self._workers.processes
            reply = hear(script, "the cleaner")
            self._looking = False
            self.deleted += int(reply["deleted"])
            self.cpu_ns = int(reply["cpu_ns"])
