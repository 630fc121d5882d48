"""Out of the index: a name goes with its inode and the attributes of that."""

from kvfs.core.types import InodeNo, InodeRecord
from kvfs.pool.pool import Pool
from kvfs.storage.index_transaction import WriteTransaction


def drop(txn: WriteTransaction, pool: Pool, ino: InodeNo, record: InodeRecord) -> None:
    """Take all rows of *ino* out; who has it open keeps its attributes until the last close.

    Its user is not charged for it any more, also if the commit fails: until the next start.
    """
    txn.delete_name(record.parent, record.name, ino)
    txn.delete_inode(ino)
    attributes = txn.delete_xattrs(ino)
    pool.node_shares.go(ino, record, attributes)
    if (opened := pool.open_inodes.get(ino)) is not None:
        opened.attributes = attributes
