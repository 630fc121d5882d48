"""The settings of the index: its size, its checkpoints, and what attributes may take of it."""

from dataclasses import dataclass

from kvfs.core.checksum_settings import ChecksumSettings
from kvfs.core.setting_values import setting
from kvfs.core.sizes import GIB, KIB, MIB, TIB


@dataclass(frozen=True, slots=True)
class IndexSettings(ChecksumSettings):
    """A part of ``Settings``, which is too long for one file."""

    index_map_bytes: int = setting(
        64 * GIB,
        "address space only; a name takes some 550 bytes, and if it is full blocks are evicted",
        unit="bytes",
        low=16 * MIB,
        high=16 * TIB,
    )
    index_preallocate_bytes: int = setting(
        64 * MIB,
        "allocated ahead of use, because deletes need space in the index even on a full disk",
        unit="bytes",
        low=MIB,
        high=64 * GIB,
    )
    checkpoint_s: float = setting(
        30.0,
        "a power loss then costs seconds, not a rebuild; each writes what changed since; 0: none",
        unit="s",
        low=0,
        high=86_400,
    )
    xattr_value_max_bytes: int = setting(
        4 * KIB,
        "user xattrs live in the index, which is for names",
        unit="bytes",
        low=0,
        high=64 * KIB,
    )
    xattr_total_max_bytes: int = setting(
        16 * KIB,
        "per inode, names and values together: the index is for names",
        unit="bytes",
        low=0,
        high=1024 * KIB,
    )
