"""A version of kvfs that is not installed: a copy of this tree, changed, and its own commands."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from kvfs import __version__
from tests.support.mounts.mounting import COMMAND_WAIT_S, ROOT


class Tree:
    """Another version of kvfs: a copy, with changes."""

    def __init__(self, place: Path) -> None:
        """Copy this tree to *place*; it says that it is version 9.8.7."""
        self.place = place
        for package in ("kvfs", "mount"):
            shutil.copytree(ROOT / package, place / package, ignore=lambda *_: ["__pycache__"])
        self.change("kvfs/__init__.py", __version__, "9.8.7")

    def change(self, path: str, old: str, new: str) -> None:
        """Replace *old*, which must be there, in the file *path*."""
        text = (self.place / path).read_text()
        assert old in text
        (self.place / path).write_text(text.replace(old, new))

    def kvfs(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run a command of this version."""
        return subprocess.run(
            [sys.executable, "-P", "-m", "kvfs.cli.main", *words],
            env={**os.environ, "PYTHONPATH": str(self.place)},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=COMMAND_WAIT_S,
            check=False,
        )
