"""Gives a tree the version of a release: ``python3 make/release_version.py TREE VERSION``.

Everywhere where a version stands: the package, Debian's changelog, the chart. A tag is the one home
of a release's version; what is committed says which one comes next.
"""

import datetime
import re
import sys
from pathlib import Path
from typing import Final

#: As Python's packages, Debian's and charts all take it; 1.0.0rc1 is no version of a chart.
_VERSION: Final = re.compile(r"\d+\.\d+\.\d+(\+[0-9a-z.]+)?")


def give_version(tree: Path, version: str) -> None:
    """Write *version* into the files of *tree*. Raises ValueError if it is none or has no place."""
    if not _VERSION.fullmatch(version):
        raise ValueError(f"{version!r} is no version such as 1.2.3")
    _replace(tree / "kvfs/__init__.py", r'^__version__ = "[^"]*"$', f'__version__ = "{version}"')
    chart = tree / "docs/kubernetes/chart/Chart.yaml"
    _replace(chart, r"^version: \S+$", f"version: {version}")
    # No "+" in the tag of an image.
    _replace(chart, r"^appVersion: \S+$", f'appVersion: "{version.replace("+", "-")}"')
    changelog = tree / "debian/changelog"
    if not changelog.read_text().startswith(f"kvfs ({version})"):
        now = datetime.datetime.now(datetime.UTC).strftime("%a, %d %b %Y %H:%M:%S +0000")
        told = "  * /usr/share/doc/kvfs/CHANGELOG.md tells what changes."
        author = "kvfs authors <kvfs@users.noreply.github.com>"
        first = (
            f"kvfs ({version}) unstable; urgency=medium\n\n{told}\n\n -- The {author}  {now}\n\n"
        )
        changelog.write_text(first + changelog.read_text())


def _replace(file: Path, line: str, instead: str) -> None:
    text, count = re.subn(line, instead, file.read_text(), flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"{file}: {count} lines are as {line}")
    file.write_text(text)


if __name__ == "__main__":
    give_version(Path(sys.argv[1]), sys.argv[2])
