"""The life of a block: one total table of states and events (docs/dev/block-life.md draws it).

Pure. Directories, symlinks and special files are NODE: they have no bytes and no life of their
own. Nor has an ALIAS, a second name of a block (inode_rules.py). Connectors are told apart by what
they do, never by who they are: a block that was renamed is final; one written under its final name
belongs to the process that wrote it; one that was allocated ahead or rewritten in place is a slab.
"""

import stat
from enum import IntEnum, StrEnum
from typing import Final, NamedTuple

from kvfs.core.types import InodeRecord


class State(IntEnum):
    """Where a block is in its life; the numbers are part of the format (docs/dev/format.md)."""

    NODE = 0
    DRAFT = 1
    PUBLISHED = 2
    SLAB = 3
    #: Was final, and is open for writing again: its size and times come from its extent.
    REWRITE = 4
    #: Closed under the name it was created with: belongs to its writer while that process lives.
    LEASED = 5
    #: A draft with space allocated ahead of its bytes: becomes a slab unless it is renamed.
    SLAB_DRAFT = 6
    #: A slab whose process has ended.
    ORPHAN_SLAB = 7
    #: A temporary name that its writer left behind.
    ORPHAN = 8
    #: A writer was killed while writing. Removed with its last handle. Never stored.
    TORN = 9
    #: A ready extent, before there is a draft. Never stored.
    READY = 10
    #: Has no name any more, and is kept for its open handles. Never stored.
    GONE = 11
    #: A slab that was rewritten in place and closed. Its bytes belong together, so a later rewrite
    #: can tear it.
    REWRITTEN = 12
    #: Renamed by its writer, and not closed yet.
    RENAMED = 13
    #: Closed under the name it was created with, where only a rename publishes: its maker alone
    #: sees it.
    UNRENAMED = 14
    #: A second name, not a block: it goes with its block, or with the process that linked it.
    ALIAS = 15


class Event(StrEnum):
    """What happens to a block."""

    TAKE = "create takes the extent"
    ALLOCATE = "fallocate, or truncate up"
    RENAME = "rename to another name"
    TEAR = "a writer dies of a signal"
    CLOSE = "last writable close"
    EXTEND = "last writable close, bytes were added only"
    REOPEN = "open for writing"
    WITHHOLD = "after CLOSE, where only a rename publishes"
    EMPTY = "a file server truncates it to 0"
    MAKER_DIED = "its maker is gone"
    REMOVE = "unlink, replace or evict"


class Seen(StrEnum):
    """Who may see a block under its name."""

    NOBODY = "nobody"
    BY_POLICY = "all, or its owner alone"
    OWNER = "its owner alone"
    ALL = "all"


class Goes(IntEnum):
    """Whether a block may be evicted, and in which order: a higher number later."""

    NEVER = 0
    FIRST = 1
    BY_POLICY = 2
    AFTER_LEASES = 3


class StateRules(NamedTuple):
    """One state's rules. ``on`` maps each legal event to the state it leads to."""

    seen: Seen
    goes: Goes
    on: dict[Event, State]


TABLE: Final[dict[State, StateRules]] = {
    State.READY: StateRules(
        Seen.NOBODY, Goes.FIRST, {Event.TAKE: State.DRAFT, Event.REMOVE: State.GONE}
    ),
    State.DRAFT: StateRules(
        Seen.BY_POLICY,
        Goes.NEVER,
        {
            Event.ALLOCATE: State.SLAB_DRAFT,
            Event.RENAME: State.RENAMED,
            Event.TEAR: State.TORN,
            Event.CLOSE: State.LEASED,
            Event.REOPEN: State.DRAFT,
            Event.MAKER_DIED: State.DRAFT,
            Event.REMOVE: State.GONE,
        },
    ),
    State.SLAB_DRAFT: StateRules(
        Seen.BY_POLICY,
        Goes.NEVER,
        {
            Event.ALLOCATE: State.SLAB_DRAFT,
            Event.RENAME: State.RENAMED,
            Event.TEAR: State.TORN,
            Event.CLOSE: State.SLAB,
            Event.REOPEN: State.SLAB_DRAFT,
            Event.MAKER_DIED: State.SLAB_DRAFT,
            Event.REMOVE: State.GONE,
        },
    ),
    State.TORN: StateRules(
        Seen.BY_POLICY,
        Goes.NEVER,
        {
            Event.ALLOCATE: State.TORN,
            Event.RENAME: State.TORN,
            Event.TEAR: State.TORN,
            Event.CLOSE: State.GONE,
            Event.REOPEN: State.TORN,
            Event.MAKER_DIED: State.TORN,
            Event.REMOVE: State.GONE,
        },
    ),
    State.LEASED: StateRules(
        Seen.ALL,
        Goes.NEVER,
        {
            Event.ALLOCATE: State.SLAB,
            Event.RENAME: State.PUBLISHED,
            Event.REOPEN: State.REWRITE,
            Event.WITHHOLD: State.UNRENAMED,
            Event.MAKER_DIED: State.PUBLISHED,
            Event.REMOVE: State.GONE,
        },
    ),
    State.UNRENAMED: StateRules(
        Seen.OWNER,
        Goes.NEVER,
        {
            Event.ALLOCATE: State.UNRENAMED,
            Event.RENAME: State.PUBLISHED,
            Event.REOPEN: State.DRAFT,
            Event.MAKER_DIED: State.GONE,
            Event.REMOVE: State.GONE,
        },
    ),
    State.RENAMED: StateRules(
        Seen.ALL,
        Goes.NEVER,
        {
            Event.ALLOCATE: State.RENAMED,
            Event.RENAME: State.RENAMED,
            # Only if bytes were written after the rename; what was renamed was whole.
            Event.TEAR: State.TORN,
            Event.CLOSE: State.PUBLISHED,
            Event.REOPEN: State.REWRITE,
            # The file server's client has a handle of this inode, so it cannot get a new one.
            Event.EMPTY: State.DRAFT,
            Event.MAKER_DIED: State.RENAMED,
            Event.REMOVE: State.GONE,
        },
    ),
    State.PUBLISHED: StateRules(
        Seen.ALL,
        Goes.BY_POLICY,
        {
            Event.ALLOCATE: State.SLAB,
            Event.RENAME: State.PUBLISHED,
            Event.REOPEN: State.REWRITE,
            Event.MAKER_DIED: State.PUBLISHED,
            Event.REMOVE: State.GONE,
        },
    ),
    State.REWRITE: StateRules(
        Seen.ALL,
        Goes.NEVER,
        {
            # A block that was whole can still be torn. For an empty one, or a former orphan slab,
            # publishing.py takes the event from the state before the rewrite.
            Event.ALLOCATE: State.REWRITE,
            Event.RENAME: State.REWRITE,
            Event.TEAR: State.TORN,
            Event.CLOSE: State.REWRITTEN,
            Event.EXTEND: State.LEASED,
            Event.REOPEN: State.REWRITE,
            Event.EMPTY: State.DRAFT,
            Event.MAKER_DIED: State.REWRITE,
            Event.REMOVE: State.GONE,
        },
    ),
    State.REWRITTEN: StateRules(
        Seen.ALL,
        Goes.NEVER,
        {
            Event.ALLOCATE: State.SLAB,
            Event.RENAME: State.PUBLISHED,
            Event.REOPEN: State.REWRITE,
            Event.MAKER_DIED: State.ORPHAN_SLAB,
            Event.REMOVE: State.GONE,
        },
    ),
    State.SLAB: StateRules(
        Seen.ALL,
        Goes.NEVER,
        {
            Event.ALLOCATE: State.SLAB,
            # Written piece by piece through many opens under a temporary name (UCM, GDS).
            Event.RENAME: State.PUBLISHED,
            Event.TEAR: State.SLAB,
            Event.CLOSE: State.SLAB,
            Event.REOPEN: State.SLAB,
            Event.WITHHOLD: State.UNRENAMED,
            Event.EMPTY: State.DRAFT,
            Event.MAKER_DIED: State.ORPHAN_SLAB,
            Event.REMOVE: State.GONE,
        },
    ),
    State.ORPHAN_SLAB: StateRules(
        Seen.ALL,
        Goes.AFTER_LEASES,
        {
            Event.ALLOCATE: State.SLAB,
            Event.RENAME: State.PUBLISHED,
            Event.REOPEN: State.REWRITE,
            Event.MAKER_DIED: State.ORPHAN_SLAB,
            Event.REMOVE: State.GONE,
        },
    ),
    State.ORPHAN: StateRules(
        Seen.ALL,
        Goes.FIRST,
        {
            Event.ALLOCATE: State.SLAB,
            Event.RENAME: State.PUBLISHED,
            Event.REOPEN: State.REWRITE,
            Event.MAKER_DIED: State.ORPHAN,
            Event.REMOVE: State.GONE,
        },
    ),
    State.GONE: StateRules(
        Seen.NOBODY,
        Goes.NEVER,
        {event: State.GONE for event in Event if event is not Event.TAKE},
    ),
}

#: Not yet closed by its first writers: its size comes from its extent.
UNFINISHED: Final = frozenset({State.DRAFT, State.SLAB_DRAFT})
#: Whole; its size and times are in the index.
SETTLED: Final = frozenset(
    {
        State.PUBLISHED,
        State.LEASED,
        State.UNRENAMED,
        State.SLAB,
        State.REWRITTEN,
        State.ORPHAN_SLAB,
        State.ORPHAN,
    }
)
#: May be hidden from some processes: each LOOKUP checks the caller; the kernel caches no name.
HIDEABLE: Final = UNFINISHED | {State.UNRENAMED}
#: Allocated ahead, or rewritten in place.
SLABS: Final = frozenset({State.SLAB, State.REWRITTEN, State.ORPHAN_SLAB})
#: Written once, and found by all.
FINAL: Final = frozenset({State.PUBLISHED, State.LEASED, State.ORPHAN})
#: Has an identity on the device once its bytes are durable (identities.py), from which it is
#: recovered after a power loss. A SLAB keeps its state while it is open for writing, but has no
#: identity then.
IDENTIFIED: Final = FINAL | SLABS
#: Belongs to the process that made it, while that process lives.
HELD: Final = frozenset({State.LEASED, State.UNRENAMED, State.SLAB, State.REWRITTEN})
#: The HELD states that count as leases. Not SLAB: it asked for its space before it was written.
LEASES: Final = HELD - {State.SLAB}

assert set(TABLE) == set(State) - {State.NODE, State.ALIAS}, "every state has a row"


class IllegalEvent(ValueError):
    """An event that is not in the state's row. Nothing has changed."""


def after(state: State, event: Event) -> State:
    """Return the state that *event* leads to from *state*. Raises IllegalEvent."""
    try:
        return TABLE[state].on[event]
    except KeyError:
        raise IllegalEvent(f"{event.name} in {state.name}") from None


_SHOWN_AS: Final = {
    State.REWRITTEN: State.SLAB,
    State.RENAMED: State.PUBLISHED,
    State.UNRENAMED: State.DRAFT,
}


def label(state: State) -> str:
    """Return the word that users read for *state*."""
    return _SHOWN_AS.get(state, state).name.lower()


def carries_identity(record: InodeRecord) -> bool:
    """Whether *record*'s inode has an identity; drafts and second names have none."""
    if stat.S_ISREG(record.mode):
        return record.state in IDENTIFIED
    return record.state != State.ALIAS


def is_temporary(name: bytes) -> bool:
    """Whether *name* looks like the temporary name that connectors use until they rename the file.

    ``K.tmp`` (LMCache, UCM), ``K_RANDOM.tmp`` (vLLM, llm-d), ``.HEX.tmp`` (SGLang), ``K.tmp.HEX``
    and ``K.tmpHEX`` (LMCache NIXL, GDS).
    """
    head, dot, tail = name.rpartition(b".tmp")
    return bool(dot) and (head != b"" or tail != b"") and b"/" not in tail and len(tail) <= 40


#: The most names in a directory where files belong to a slab: more are blocks of their own.
BESIDE_SLAB_MAX: Final = 64
#: How files end that say what is in others, of whatever size: Mooncake's ``kv_cache.meta``,
#: marconi's ``.marconi_l2_manifest.json``, SQLite's database and its log (sqlite.org/wal.html).
_INDEXES: Final = (
    *(b".json", b".meta", b".manifest"),
    *(b".db", b".sqlite", b".sqlite3", b"-wal", b"-shm"),
)


def is_index(name: bytes) -> bool:
    """Whether the file *name* may say what is in a slab beside it."""
    return name.endswith(_INDEXES)
