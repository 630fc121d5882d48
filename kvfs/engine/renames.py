"""Renames: of a name as it is, or of a finished draft that lost that name and now gets it."""

from kvfs.core.types import InodeNo
from kvfs.engine.blocks.blocks import Blocks
from kvfs.engine.names.namespace import Namespace
from kvfs.machine.processes import NOBODY, SERVER, Maker
from kvfs.pool.pool import Pool


class Renames:
    """Moves the names of one pool."""

    def __init__(self, pool: Pool, namespace: Namespace, blocks: Blocks) -> None:
        self._pool = pool
        self._namespace = namespace
        self._blocks = blocks

    def rename(
        self,
        parent: InodeNo,
        name: bytes,
        new_parent: InodeNo,
        new_name: bytes,
        *,
        replace: bool,
        who: Maker = NOBODY,
        request: int = 0,
    ) -> InodeNo | None:
        """Move a name (``Namespace.rename``), or publish the finished draft that lost that name.

        *who* is the calling process, *request* its request's number. Returns the inode that lost
        its name.
        """
        truncating, closes = self._blocks.truncating, self._blocks.last_closes
        renames = (parent, name) != (new_parent, new_name)
        if replace and renames and truncating.displaced.contended(parent, name):
            closes.settle()
            ino = self._namespace.lookup(parent, name)
            awaited = truncating.is_awaited(ino)
            finished = truncating.displaced.meant(parent, name, ino, who, awaited=awaited)
            if finished is not None:
                replaced = truncating.displaced.restore(
                    self._namespace, finished, new_parent, new_name, request=request
                )
                for changed in ((parent, name), (new_parent, new_name)):
                    self._pool.kernel.name_vanished(*changed)
                return replaced
        if renames and truncating.displaced.fought_over(parent, name):
            closes.settle()
            truncating.refuse_unfinished(self._namespace.lookup(parent, name), who)
        if who == SERVER and renames:
            closes.settle()
            self._blocks.served.renames(self._namespace.lookup(parent, name))
        replaced = self._namespace.rename(
            *(parent, name, new_parent, new_name),
            replace=replace,
            who=who,
            request=request,
            closes=closes,
        )
        if who == SERVER:
            self._blocks.served.renamed(self._namespace.lookup(new_parent, new_name))
        return replaced
