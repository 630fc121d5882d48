"""How much each program and model holds now, by names, and each tenant; what is above a block.

Names of files and folders tell the model: docs/connectors/README.md says how each program names
its blocks.

What was there before the start is counted by the scan of the index, in the order of inode numbers.
Until it has reached one of those, changes of it count for nothing. So the figures are exact once
the scan is done, and need no memory for a block.
"""

import re
from collections.abc import Callable
from stat import S_ISDIR, S_ISREG
from typing import Any, Final, NamedTuple

from kvfs.core.account import Taken
from kvfs.core.changed import Changed, Why
from kvfs.core.lifecycle import UNFINISHED
from kvfs.core.types import LAST_INODE, NO_INODE, ROOT_INODE, InodeNo, InodeRecord
from kvfs.pool.rules.policies import TenantRules
from kvfs.storage.index import Index

#: Stands for directories or models beyond the limit. No real name has a slash.
OTHERS: Final = "/others"
#: Stands for blocks whose names tell no model.
UNKNOWN: Final = "/unknown"
#: Directories of which is remembered what lies above; for others it is looked up again.
_KNOWN_MAX: Final = 4096
#: Most levels to go up to the first one, each a read of an index row. Deeper directories count
#: with all others: no connector has so many levels.
DEPTH_MAX: Final = 32
_NO_INODE_YET: Final = InodeNo(0)
#: Digits of the hash that a name of SGLang's begins with.
_SGLANG_HASH: Final = 64
_UNDERSCORE: Final = ord("_")
#: vLLM's tier ``fs``: ``MODEL_CONFIG_rRANK``, where CONFIG is a hash of dtype, layout and versions.
_VLLM_FOLDER: Final = re.compile(rb"(.+_[0-9a-f]{12})_r[0-9]+", re.DOTALL)
#: Directories that may tell a model, from that of a block upwards: vLLM makes two below its folder.
FOLDERS: Final = 3


def model_of(name: bytes) -> bytes:
    """Return the model in a block's *name*; b"" if the connector does not put it there.

    LMCache: ``MODEL@WORLD@RANK@HASH@DTYPE.pt`` and ``MODEL@RANK@GROUP@HASH.data``. SGLang:
    ``HASH_MODEL_RANK_RANKS.bin``, and of models that all ranks share ``HASH_MODEL.bin``.
    """
    parts = name.split(b"@", 3)
    if len(parts) == 4:
        return parts[0]
    if len(name) <= _SGLANG_HASH or name[_SGLANG_HASH] != _UNDERSCORE or name[-4:] != b".bin":
        return b""
    model, *ranks = name[_SGLANG_HASH + 1 : -4].rsplit(b"_", 2)
    return (
        model if len(ranks) == 2 and all(map(bytes.isdigit, ranks)) else b"_".join([model, *ranks])
    )


def model_of_folder(name: bytes) -> bytes:
    """Return the model, with its configuration, that a directory's *name* tells; b"" if none."""
    found = _VLLM_FOLDER.fullmatch(name)
    return found[1] if found is not None else b""


def holder_of(name: bytes, folder_model: bytes) -> str:
    """Return program and model of the block *name*; "" if nothing tells them.

    *folder_model* is what the nearest of its directories tells.
    """
    model = model_of(name)
    if model:
        program = "lmcache" if name.count(b"@") > 2 else "sglang"
    else:
        program, model = "vllm", folder_model
    return f"{program} {model.decode(errors='backslashreplace')}" if model else ""


class Above(NamedTuple):
    """What lies above the files of one directory.

    ``top`` is the first-level directory that it is or lies in: the root for itself, ``NO_INODE`` if
    that cannot be read or is farther up than DEPTH_MAX. ``model`` is what the nearest of FOLDERS
    directories tells, b"" if none does.
    """

    top: InodeNo
    model: bytes


class Folders:
    """What lies above the files of each directory."""

    def __init__(self, index: Index) -> None:
        self._index: Final = index
        self._known: dict[InodeNo, Above] = {}

    def above(self, directory: InodeNo) -> Above:
        """Return what lies above the files of *directory*."""
        found = self._known.get(directory)
        if found is None:
            found = Above(self._find_top(directory), self._find_model(directory))
            if found.top != NO_INODE or self._index.inode_or_miss(directory) is not None:
                if len(self._known) >= _KNOWN_MAX:
                    self._known.clear()
                self._known[directory] = found
        return found

    def tree_changed(self) -> None:
        """A directory moved."""
        self._known.clear()

    def _find_top(self, directory: InodeNo) -> InodeNo:
        at = top = directory
        for _ in range(DEPTH_MAX):
            if at == ROOT_INODE:
                return top
            if (known := self._known.get(at)) is not None:
                return known.top
            record = self._index.inode_or_miss(at)
            if record is None:
                return NO_INODE
            top, at = at, record.parent
        return NO_INODE

    def _find_model(self, directory: InodeNo) -> bytes:
        for _ in range(FOLDERS):
            record = None if directory == ROOT_INODE else self._index.inode_or_miss(directory)
            if record is None:
                break
            if model := model_of_folder(record.name):
                return model
            directory = record.parent
        return b""


class _Row:
    """What one program and model holds."""

    __slots__ = ("blocks", "held_bytes")

    def __init__(self) -> None:
        self.blocks = self.held_bytes = 0


class HeldByModel:
    """Blocks and bytes by program and model: of up to *names_max*; the rest share one row."""

    #: A draft is nobody's yet.
    follows: Final = frozenset(Why) - {Why.DRAFTED, Why.ATTRIBUTED, Why.FOUND}

    def __init__(
        self, folders: Folders, names_max: int, stored: Taken, tenants: TenantRules
    ) -> None:
        """Give a row each to *names_max* models. *stored* is counted beside it, by *tenants*."""
        self._folders: Final = folders
        self._names_max: Final = names_max
        self._stored: Final = stored
        self._tenants: Final = tenants
        #: Whether a directory that tells a model was moved.
        self._tells_else = False
        self._last_told = (NO_INODE, b"", False)
        self._last = _Row()
        self.begin()

    @property
    def outdated(self) -> bool:
        """Whether blocks below some directory count anew: for another model, or tenant."""
        return self._tells_else or self._tenants.outdated

    # ---- the scan ----

    def begin(self, is_new: Callable[[InodeNo], bool] = lambda _: False) -> None:
        """Begin to count: a scan finds all inodes but those that are new, which count at once."""
        self._tells_else = self._tenants.outdated = False
        self._is_new = is_new
        #: Inodes up to this one are counted.
        self._reached = _NO_INODE_YET
        self._rows: dict[str, _Row] = {UNKNOWN: _Row(), OTHERS: _Row()}
        self._stored.begin_anew()
        self._forget_last()

    def find(self, ino: InodeNo, record: InodeRecord) -> None:
        """The scan has come to *ino*."""
        if ino > self._reached and not self._is_new(ino):
            self._reached = ino
            if S_ISREG(record.mode) and record.state not in UNFINISHED:
                self._count(record, 1, record.allocated_bytes)

    def end(self) -> None:
        """The scan has found all: from now on every change counts."""
        self._reached = LAST_INODE

    # ---- what changes ----

    def follow(self, changed: Changed) -> None:
        """Count what came and went."""
        ino, before, after = changed.ino, changed.before, changed.after
        if before is not None and before.state not in UNFINISHED:
            if S_ISDIR(before.mode):
                self._note_moved(before, after)
            elif S_ISREG(before.mode) and (ino <= self._reached or self._is_new(ino)):
                self._count(before, -1, -before.allocated_bytes)
        if after is None or after.state in UNFINISHED or not S_ISREG(after.mode):
            return
        if ino <= self._reached or self._is_new(ino):
            self._count(after, 1, after.allocated_bytes)

    def _note_moved(self, before: InodeRecord, after: InodeRecord | None) -> None:
        if after is None:  # a directory that goes is empty
            return
        if (before.parent, before.name) == (after.parent, after.name):
            return
        self._folders.tree_changed()
        self._forget_last()
        told = model_of_folder(before.name), self._folders.above(before.parent).model
        tells = model_of_folder(after.name), self._folders.above(after.parent).model
        self._tells_else = self._tells_else or told != tells

    def _count(self, record: InodeRecord, blocks: int, held_bytes: int) -> None:
        # Most names have the same directory, model and program as the one before.
        told = record.parent, model_of(record.name), b"@" in record.name
        if told != self._last_told:
            self._last_told, self._last = told, self._row_of(record.parent, record.name)
        self._last.blocks += blocks
        self._last.held_bytes += held_bytes
        self._stored.count(self._tenants.of(record), held_bytes)

    def _row_of(self, parent: InodeNo, name: bytes) -> _Row:
        holder = holder_of(name, self._folders.above(parent).model) or UNKNOWN
        # No row is dropped while it is counted: what is in the shared one now must leave it later.
        if holder not in self._rows and len(self._rows) >= self._names_max + 2:
            holder = OTHERS
        return self._rows.setdefault(holder, _Row())

    def _forget_last(self) -> None:
        self._last_told, self._last = (NO_INODE, b"", False), _Row()

    def shown(self) -> dict[str, Any]:
        """Return blocks and bytes by program and model for `kvfs status`, the largest first."""
        rows = sorted(self._rows.items(), key=lambda row: (-row[1].held_bytes, row[0]))
        return {
            holder: {"blocks": row.blocks, "bytes": row.held_bytes}
            for holder, row in rows
            if row.blocks > 0
        }
