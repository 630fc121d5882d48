"""The settings that are shares of the pool: how much of it one use may take from all others."""

from dataclasses import dataclass

from kvfs.core.report_settings import ReportSettings
from kvfs.core.setting_values import setting, share
from kvfs.core.sizes import GIB, TIB


@dataclass(frozen=True, slots=True)
class ShareSettings(ReportSettings):
    """A part of ``Settings``, which is too long for one file."""

    lease_max: float = share(
        0.92,
        "of the capacity under leases: connectors with an index keep 90 %, others need the rest",
    )
    pin_share: float = share(
        0.5, "of the capacity kept by pins and evict=never: the rest must be evictable"
    )
    length_share: float = share(
        0.5,
        "of the capacity for open files that were set to a length, until they are written: a store "
        "through a mapping that finds no space ends its process",
    )
    old_versions_share: float = share(
        0.25,
        "of the capacity for old versions of rewritten blocks that are still read: beyond it the "
        "rewriter gets ENOSPC, and others do not",
    )
    ready_share: float = setting(
        0.05,
        "largest share of the capacity in extents that nobody has written yet",
        unit="share",
        low=0,
        high=0.5,
    )
    file_server_passthrough_max: float = share(
        0.5, "of the capacity that servers may have open on passthrough, where no eviction frees it"
    )
    directory_reserve_share: float = setting(
        0.05,
        "share of the parent file system that a directory source leaves to others",
        unit="share",
        low=0,
        high=0.9,
    )
    directory_reserve_bytes: int = setting(
        10 * GIB,
        "upper limit of directory_reserve_share on a large file system",
        unit="bytes",
        low=0,
        high=1024 * TIB,
    )
