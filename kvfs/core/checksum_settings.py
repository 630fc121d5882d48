"""The settings of checksums, and of files that are kept aside (quarantine, strays)."""

from dataclasses import dataclass

from kvfs.core.setting_values import setting
from kvfs.core.share_settings import ShareSettings
from kvfs.core.sizes import GIB, MIB


@dataclass(frozen=True, slots=True)
class ChecksumSettings(ShareSettings):
    """A part of ``Settings``, which is too long for one file."""

    checksum_share: float = setting(
        0.1,
        "largest share of a core for checksums of what was stored; blocks beyond it get none",
        unit="share",
        low=0,
        high=1,
    )
    checksum_stop_s: float = setting(
        2.0,
        "how long a stop may go on making checksums of what it makes durable; the rest gets none",
        unit="s",
        low=0,
        high=600,
    )
    verify: str = setting(
        "doubtful",
        "blocks of before a power loss are compared with their checksum at their first open; open: "
        "all blocks of before the start, and what is not in the page cache is read for its "
        "checksum; scrub: also all others, again and again, and those without a checksum get one; "
        "off: none",
        choices=("off", "doubtful", "open", "scrub"),
    )
    scrub_bytes_per_s: int = setting(
        32 * MIB,
        "a terabyte in nine hours; only while clients do not store",
        unit="bytes",
        low=MIB,
        high=64 * GIB,
    )
    quarantine_files_max: int = setting(
        16, "blocks with wrong bytes that are kept for a look; 0: none", low=0, high=1024
    )
    quarantine_bytes: int = setting(
        256 * MIB,
        "largest sum of their sizes: they take room from blocks",
        unit="bytes",
        low=0,
        high=64 * GIB,
    )
    stray_grace_s: float = setting(
        86_400.0,
        "a day: files without a name after an unclean start wait, if nobody needs their room",
        unit="s",
        low=0,
        high=31_536_000,
    )
    strays_max: int = setting(
        65_536,
        "such files at once, 200 B each; for one more the oldest goes",
        low=0,
        high=10_000_000,
    )
