"""The NFS server's table of exports as text: ``PATH<TAB>CLIENT(OPTION,...)``, one each line."""

import re
from collections.abc import Iterator
from typing import Final

from kvfs.doctor.facts import Export

_LINE: Final = re.compile(r"(?P<path>\S+)\s+(?P<client>[^\s(]+)\((?P<options>[^)]*)\)")
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")


def parse_exports(text: str, mountpoint: str) -> tuple[Export, ...]:
    """Return the exports of *mountpoint* and of what lies below it."""
    everything = list(_exports(text))
    paths_of: dict[str, set[str]] = {}
    for export in everything:
        if fsid := fsid_of(export):
            paths_of.setdefault(fsid, set()).add(export.path)
    return tuple(
        export._replace(
            same_fsid=tuple(sorted(paths_of.get(fsid_of(export), set()) - {export.path}))
        )
        for export in everything
        if export.path == mountpoint or export.path.startswith(f"{mountpoint}/")
    )


def fsid_of(export: Export) -> str:
    """Return the fsid= of *export*, "" if it has none."""
    return next((one for one in sorted(export.options) if one.startswith("fsid=")), "")


def _exports(text: str) -> Iterator[Export]:
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is not None:
            octal = match["path"].encode(errors="surrogateescape").decode("latin-1")
            raw = _ESCAPED.sub(lambda escape: chr(int(escape[1], 8)), octal).encode("latin-1")
            path = raw.decode(errors="surrogateescape")
            yield Export(path, match["client"], frozenset(match["options"].split(",")))
