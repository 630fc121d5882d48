"""The names under which modules are installed: what is mount/ here is kvfs_mount/ in site-packages.

There a package called mount could be anybody's. In this tree the short name stays: whoever builds a
wheel gets the other one, in the folder's name, in imports and in the names of modules that are
imported later. Nothing else of a file changes.
"""

import re
from pathlib import Path
from typing import Final

HERE: Final = "mount"
INSTALLED: Final = "kvfs_mount"
_ROOT: Final = Path(__file__).parents[1]
#: An import statement; a module's name as a text; the path of a file that is run by it.
_NAMED: Final = re.compile(
    rf"^(?P<statement>\s*from ){HERE}(?=\.| import )"
    rf"|(?P<quote>[\"']){HERE}(?=(?P<module>(?:\.\w+)+)[\"'])"
    rf"|(?P<slash>/){HERE}(?=(?P<file>(?:/\w+)+\.py)[\"'])",
    re.MULTILINE,
)
#: It would bind the name itself, under which code goes on to speak of the package.
_BINDS: Final = re.compile(rf"^\s*import {HERE}\b", re.MULTILINE)


def as_installed(text: str) -> str:
    """Return the source *text* with an installation's names. Raises ValueError if it cannot."""
    if found := _BINDS.search(text):
        raise ValueError(f"{found[0].strip()!r}: write `from {HERE} import ...`")
    return _NAMED.sub(_installed, text)


def _installed(found: re.Match[str]) -> str:
    before = found["statement"] or found["quote"] or found["slash"]
    # mount.fuse.kvfs is a helper of mount(8), and no module.
    path = found["file"] or (found["module"] and found["module"].replace(".", "/"))
    is_ours = path is None or any(
        (_ROOT / HERE / f"{path[1:]}{end}").exists() for end in ("", ".py")
    )
    return f"{before}{INSTALLED if is_ours else HERE}"


def packages_installed(packages: list[str]) -> list[str]:
    """Return the names of *packages* in an installation."""
    return [re.sub(rf"^{HERE}(?=\.|$)", INSTALLED, name) for name in packages]
