"""Out of the index: a name goes with its inode and the attributes of that."""

from kvfs.index_transaction import WriteTransaction
from kvfs.open_inodes import OpenInodes
from kvfs.types import InodeNo, InodeRecord


def drop(txn: WriteTransaction, open_inodes: OpenInodes, ino: InodeNo, record: InodeRecord) -> None:
    """Take all rows of *ino* out; who has it open keeps its attributes until the last close."""
    txn.delete_name(record.parent, record.name, ino)
    txn.delete_inode(ino)
    attributes = txn.delete_xattrs(ino)
    if (opened := open_inodes.get(ino)) is not None:
        opened.attributes = attributes
