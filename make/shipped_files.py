"""Every file that comes with kvfs beside its modules, by its place below a prefix.

The wheel has them as data files (setup.py), so that a prefix such as /usr/local or a virtual
environment gets them, and the Debian package takes them from there. ``python -m make.shipped_files
PREFIX`` writes them below PREFIX.
"""

import sys
from pathlib import Path
from typing import Final

from make.completion import completions
from make.man_pages import pages

ROOT: Final = Path(__file__).resolve().parents[1]
DOC: Final = "share/doc/kvfs"
UNITS: Final = "lib/systemd/system"
#: What has a place of its own below a prefix, as it is.
_PLACES: Final = {
    "systemd/kvfs@.service": f"{UNITS}/kvfs@.service",
    "logrotate/kvfs": "share/kvfs/logrotate",
}
#: With its folders, so that what one page says of another is found.
_DOCUMENTS: Final = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "LICENSE",
    "Dockerfile",
    "docs",
)


def shipped_files() -> dict[str, bytes]:
    """Return the bytes of each file by its place below a prefix."""
    found = {place: text.encode() for place, text in completions().items()}
    for name, text in pages().items():
        found[f"share/man/man{name[-1]}/{name}"] = text.encode()
    for path, place in _PLACES.items():
        found[place] = (ROOT / path).read_bytes()
    for top in _DOCUMENTS:
        for path in (ROOT / top, *(ROOT / top).rglob("*")):
            if path.is_file():
                found[f"{DOC}/{path.relative_to(ROOT)}"] = path.read_bytes()
    return found


def written(prefix: Path) -> dict[str, list[str]]:
    """Write all of them below *prefix*; return the paths by folder, as setuptools takes them."""
    folders: dict[str, list[str]] = {}
    for place, content in sorted(shipped_files().items()):
        path = prefix / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        folders.setdefault(str(Path(place).parent), []).append(str(path))
    return folders


if __name__ == "__main__":
    written(Path(sys.argv[1]))
