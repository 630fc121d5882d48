"""Two versions of kvfs for one installation: a copy of this tree, and one that says another number.

``switch`` puts the one in the other's place, as an update of the package does, while servers run.
"""

import ctypes
import os
import shutil
from pathlib import Path
from typing import Final

from kvfs import __version__
from tests.support.mounts.mounting import ROOT

OTHER_VERSION: Final = f"{__version__}.post1"
_RENAME_EXCHANGE: Final = 2
_AT_FDCWD: Final = -100


class Installed:
    """The installation at *place*/installed, which ``here`` is, and the other version ``aside``."""

    def __init__(self, place: Path) -> None:
        self.here, self.aside = place / "installed", place / "aside"
        for directory in (self.here, self.aside):
            for package in ("kvfs", "mount"):
                shutil.copytree(
                    ROOT / package,
                    directory / package,
                    ignore=shutil.ignore_patterns("__pycache__"),
                )
        self.change("kvfs/__init__.py", f'"{__version__}"', f'"{OTHER_VERSION}"')
        self.version = __version__

    def change(self, path: str, old: str, new: str) -> None:
        """Replace *old*, which must be there, in a file of the version that is aside."""
        file = self.aside / path
        text = file.read_text()
        assert old in text, f"{path} has no {old!r}"
        file.write_text(text.replace(old, new))

    def switch(self) -> None:
        """Let the two versions change places, at once (renameat2(2))."""
        libc = ctypes.CDLL(None, use_errno=True)
        names = os.fsencode(self.here), os.fsencode(self.aside)
        if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        others = {__version__: OTHER_VERSION, OTHER_VERSION: __version__}
        self.version = others[self.version]
