"""What a supervisor does: one total table of states and events (docs/availability.md draws it).

Pure, as is the rule by which a dead server is started again: time is an argument. A message or a
signal may come in any state, so every state has an answer to every event.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple


class MountState(StrEnum):
    """Where a mount is, as its supervisor sees it."""

    NO_MOUNT = "no server has served yet, and none is there"
    BEGINS = "the first server starts"
    BEGINS_TO_STOP = "the first server starts, and was told to stop"
    SERVES = "a server serves"
    YIELDS = "a server was killed, so that one of another version follows"
    STOPS = "a server that serves was told to stop"
    WAITS = "the last server is dead, and the next one is not there yet"
    WAITS_TO_STOP = "the last server is dead, and the next one is only to unmount"
    RETURNS = "the next server starts"
    RETURNS_TO_STOP = "the next server starts, and is only to unmount"
    LEAVES = "the server has said that the mount is gone, and ends"
    OVER = "the supervisor ends"


class MountEvent(StrEnum):
    """What happens to a supervisor."""

    BORN = "a server was forked"
    READY = "the server says that it serves"
    GONE = "the server says that the mount is gone"
    SILENT = "the server says nothing for too long"
    DIED = "the server dies, and another one can go on"
    DIED_ALONE = "the server dies, and no other one can go on"
    NO_SERVER = "no server can be had now"
    NO_HOPE = "no server can be had: it was tried too often, or the next try would end the same way"
    UPGRADE = "an upgrade is asked for"
    FOLLOW = "a server of another version can follow"
    STOP = "SIGTERM or SIGINT"
    RELOAD = "SIGHUP"


class Act(StrEnum):
    """What the supervisor does."""

    NOTHING = "nothing"
    SERVE = "tells systemd and the log that the mount is served"
    SERVE_TO_STOP = "tells them, too, and hands the stop on to the server"
    HAND_ON = "hands the signal on to the server"
    LET_GO = "closes the files that it holds"
    KILL = "kills the server, which hangs"
    REPLACE = "kills the server: its files go to the next one"
    START_AGAIN = "starts another server, at once or after a pause"
    START_NEXT = "starts the server that follows, at once"
    TRY_AGAIN = "tries again after a pause"
    PREPARE = "asks a template of the other version whether it can go on"
    REFUSE = "refuses, and logs why"
    END = "ends all calls, and exits as the server did"
    END_DEAD = "ends likewise, and logs that the mount is dead"
    GIVE_UP = "ends likewise, logs it, and leaves for `kvfs status` why"
    QUIT = "exits"


class Step(NamedTuple):
    """What an event leads to."""

    to: MountState
    act: Act = Act.NOTHING


_DEATHS: Final = (MountEvent.DIED, MountEvent.DIED_ALONE)
_GONE: Final = {MountEvent.GONE: Step(MountState.LEAVES, Act.LET_GO)}
_END: Final = {death: Step(MountState.OVER, Act.END) for death in _DEATHS}
_END_DEAD: Final = {death: Step(MountState.OVER, Act.END_DEAD) for death in _DEATHS}
_HAND_ON: Final = {MountEvent.STOP: Act.HAND_ON, MountEvent.RELOAD: Act.HAND_ON}
_AWAITED: Final[dict[MountEvent, Step | Act]] = {
    MountEvent.NO_SERVER: Act.TRY_AGAIN,
    MountEvent.NO_HOPE: Step(MountState.OVER, Act.GIVE_UP),
    MountEvent.UPGRADE: Act.REFUSE,
}

#: What each state does, and where that leads; an act alone stays. Anything else changes nothing.
_LEADS: Final[dict[MountState, Mapping[MountEvent, Step | Act]]] = {
    MountState.NO_MOUNT: {
        MountEvent.BORN: Step(MountState.BEGINS),
        MountEvent.NO_SERVER: Step(MountState.OVER, Act.END),
        MountEvent.NO_HOPE: Step(MountState.OVER, Act.END),
        MountEvent.UPGRADE: Act.REFUSE,
        MountEvent.STOP: Step(MountState.OVER, Act.QUIT),
    },
    # However long it takes: nobody waits on the mount yet.
    MountState.BEGINS: {
        **_GONE,
        **_END,
        MountEvent.READY: Step(MountState.SERVES, Act.SERVE),
        MountEvent.UPGRADE: Act.REFUSE,
        MountEvent.STOP: Step(MountState.BEGINS_TO_STOP, Act.HAND_ON),
        MountEvent.RELOAD: Act.HAND_ON,
    },
    MountState.BEGINS_TO_STOP: {
        **_GONE,
        **_END,
        **_HAND_ON,
        MountEvent.READY: Step(MountState.STOPS, Act.SERVE_TO_STOP),
        MountEvent.UPGRADE: Act.REFUSE,
    },
    MountState.SERVES: {
        **_GONE,
        MountEvent.SILENT: Act.KILL,
        MountEvent.DIED: Step(MountState.WAITS, Act.START_AGAIN),
        MountEvent.DIED_ALONE: Step(MountState.OVER, Act.END_DEAD),
        MountEvent.UPGRADE: Act.PREPARE,
        MountEvent.FOLLOW: Step(MountState.YIELDS, Act.REPLACE),
        MountEvent.STOP: Step(MountState.STOPS, Act.HAND_ON),
        MountEvent.RELOAD: Act.HAND_ON,
    },
    MountState.YIELDS: {
        **_GONE,
        MountEvent.SILENT: Act.KILL,
        MountEvent.DIED: Step(MountState.WAITS, Act.START_NEXT),
        MountEvent.DIED_ALONE: Step(MountState.OVER, Act.END_DEAD),
        MountEvent.UPGRADE: Act.PREPARE,
        MountEvent.FOLLOW: Act.REPLACE,
        MountEvent.STOP: Step(MountState.STOPS, Act.HAND_ON),
        MountEvent.RELOAD: Act.HAND_ON,
    },
    MountState.STOPS: {
        **_GONE,
        **_END_DEAD,
        **_HAND_ON,
        MountEvent.SILENT: Act.KILL,
        MountEvent.UPGRADE: Act.REFUSE,
        MountEvent.FOLLOW: Act.REPLACE,
    },
    MountState.WAITS: {
        **_AWAITED,
        MountEvent.BORN: Step(MountState.RETURNS),
        MountEvent.STOP: Step(MountState.WAITS_TO_STOP),
    },
    MountState.WAITS_TO_STOP: {**_AWAITED, MountEvent.BORN: Step(MountState.RETURNS_TO_STOP)},
    # A signal would kill a server that starts. A stop is handed on once it is ready.
    MountState.RETURNS: {
        **_GONE,
        MountEvent.READY: Step(MountState.SERVES, Act.SERVE),
        MountEvent.SILENT: Act.KILL,
        MountEvent.DIED: Step(MountState.WAITS, Act.START_AGAIN),
        MountEvent.DIED_ALONE: Step(MountState.OVER, Act.END_DEAD),
        MountEvent.UPGRADE: Act.REFUSE,
        MountEvent.STOP: Step(MountState.RETURNS_TO_STOP),
    },
    MountState.RETURNS_TO_STOP: {
        **_GONE,
        **_END_DEAD,
        MountEvent.READY: Step(MountState.STOPS, Act.SERVE_TO_STOP),
        MountEvent.SILENT: Act.KILL,
        MountEvent.UPGRADE: Act.REFUSE,
    },
    MountState.LEAVES: {
        **_END,
        **_HAND_ON,
        MountEvent.GONE: Act.LET_GO,
        MountEvent.UPGRADE: Act.REFUSE,
    },
    MountState.OVER: {MountEvent.UPGRADE: Act.REFUSE},
}


def _total(state: MountState, leads: Mapping[MountEvent, Step | Act]) -> dict[MountEvent, Step]:
    """Return the row of *state* for every event."""
    steps = {event: leads.get(event, Act.NOTHING) for event in MountEvent}
    return {
        event: Step(state, step) if isinstance(step, Act) else step for event, step in steps.items()
    }


TABLE: Final = {state: _total(state, leads) for state, leads in _LEADS.items()}

assert set(TABLE) == set(MountState), "every state has a row"

_WANTING: Final = frozenset({MountState.NO_MOUNT, MountState.WAITS, MountState.WAITS_TO_STOP})
_SERVING: Final = frozenset({MountState.SERVES, MountState.YIELDS, MountState.STOPS})
_RETURNING: Final = frozenset({MountState.RETURNS, MountState.RETURNS_TO_STOP})


class Course:
    """The state of one mount."""

    def __init__(self, *, has_mount: bool) -> None:
        """*has_mount*: another supervisor looked after this mount, and has died."""
        self.state = MountState.WAITS if has_mount else MountState.NO_MOUNT

    def act_for(self, event: MountEvent) -> Act:
        """Go to the state that *event* leads to; return what is to be done."""
        self.state, act = TABLE[self.state][event]
        return act

    @property
    def is_over(self) -> bool:
        """Whether the supervisor ends."""
        return self.state is MountState.OVER

    @property
    def wants_server(self) -> bool:
        """Whether a server is wanted that is not there."""
        return self.state in _WANTING

    @property
    def is_served(self) -> bool:
        """Whether there is a server, and it has said that it serves."""
        return self.state in _SERVING

    @property
    def is_awaited(self) -> bool:
        """Whether the next server starts, while callers wait for it."""
        return self.state in _RETURNING


#: A server that was ready and died sooner was perhaps killed by a request. The kernel sends that
#: one again, first.
SHORT_LIFE_S: Final = 0.125
FIRST_PAUSE_S: Final = 0.1


class Tolerance(NamedTuple):
    """How many deaths of one kind in a row are tolerated, and the pause after each."""

    deaths_max: int
    at_once: int
    """The first deaths, without a pause; after those the pauses double."""
    pause_max_s: float

    def pause_s(self, deaths: int) -> float | None:
        """Return the seconds to wait after *deaths* in a row; None: give up."""
        if deaths >= self.deaths_max:
            return None
        if deaths <= self.at_once:
            return 0.0
        return min(self.pause_max_s, FIRST_PAUSE_S * 2.0 ** (deaths - self.at_once - 1))

    @property
    def pauses_s(self) -> float:
        """All pauses together, in seconds."""
        return sum(self.pause_s(deaths) or 0.0 for deaths in range(1, self.deaths_max))


#: A start that fails by itself fails again: it is the same start on the same index.
FAILED_STARTS: Final = Tolerance(deaths_max=5, at_once=0, pause_max_s=2.0)
#: With growing pauses, as the same request may kill each of them.
SHORT_LIVES: Final = Tolerance(deaths_max=10, at_once=3, pause_max_s=2.0)
#: SIGKILL comes from outside: from somebody who kills servers in a loop, or for a passing lack of
#: memory. All pauses together are some 45 s.
KILLED: Final = Tolerance(deaths_max=12, at_once=1, pause_max_s=10.0)


class Restarts:
    """Counts the deaths in a row: when a dead server is started again, and when to give up.

    Callers wait meanwhile, so the first try is at once. The number of tries decides when to give
    up, not the time: a start may just be slow because the machine is loaded.
    """

    def __init__(self) -> None:
        self._failed_starts = self._short_lives = self._killed = 0
        self._ready_s: float | None = None

    @property
    def deaths(self) -> int:
        """How many have died in a row, none of which served for long."""
        return self._failed_starts + self._short_lives + self._killed

    def started(self) -> None:
        """Note that a server starts."""
        self._ready_s = None

    def ready(self, now_s: float) -> None:
        """Note that it serves."""
        self._failed_starts = 0
        self._ready_s = now_s

    def replaced(self) -> None:
        """Note that it was ended for another one, which starts now: that is no death."""
        self._failed_starts = self._killed = 0

    def died(self, now_s: float, *, by_sigkill: bool) -> float | None:
        """Return the seconds to wait before the next start; None: give up."""
        if self._ready_s is not None and now_s - self._ready_s >= SHORT_LIFE_S:
            self._failed_starts = self._short_lives = self._killed = 0
            return 0.0
        if by_sigkill:
            self._killed += 1
            return KILLED.pause_s(self._killed)
        if self._ready_s is None:
            self._failed_starts += 1
            return FAILED_STARTS.pause_s(self._failed_starts)
        self._short_lives += 1
        return SHORT_LIVES.pause_s(self._short_lives)
