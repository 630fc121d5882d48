"""The NFS server's table of exports as text: ``PATH<TAB>CLIENT(OPTION,...)``, one each line."""

import re
from typing import Final

from kvfs.doctor.facts import Export

_LINE: Final = re.compile(r"(?P<path>\S+)\s+(?P<client>[^\s(]+)\((?P<options>[^)]*)\)")
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")


def parse_exports(text: str, mountpoint: str) -> tuple[Export, ...]:
    """Return the exports of *mountpoint* and of what lies below it."""
    found = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        path = _ESCAPED.sub(lambda escape: chr(int(escape[1], 8)), match["path"])
        if path == mountpoint or path.startswith(f"{mountpoint}/"):
            options = frozenset(match["options"].split(","))
            found.append(Export(path, match["client"], options))
    return tuple(found)
