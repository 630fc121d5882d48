"""Texts for people have sizes as people write them, not bytes by the million."""

import re
from typing import Final

from tests.support.mounts.mounting import ROOT

#: Where the exact number is what matters: small ones, and two that differ by little.
EXACT: Final = {
    "kvfs/devices/xfs.py",
    "kvfs/doctor/machine_rules.py",
    "kvfs/engine/attributes.py",
    "kvfs/engine/blocks/allocations.py",
    "kvfs/engine/blocks/blocks.py",
    "kvfs/storage/lmdb_file.py",
    "kvfs/pool/open/extent_bytes.py",
    "kvfs/bench/kv_load.py",
    "mount/fuse/libfuse_pair.py",
}
_RAW: Final = re.compile(r"_bytes[^}\n]*\} (?:of \w+ )?bytes\b")


def test_sizes_in_texts_are_for_people() -> None:
    found = {
        str(path.relative_to(ROOT))
        for folder in ("kvfs", "mount")
        for path in (ROOT / folder).rglob("*.py")
        if _RAW.search(path.read_text())
    }
    assert found <= EXACT, "say format_size(...), or that the exact number matters"
    assert found == EXACT, "no longer needed here"
