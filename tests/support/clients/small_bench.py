"""A bench of tests/bench, run once at a small size, as a command."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.mounts.mounting import ROOT


def report_of(name: str, backing: Path, *flags: str) -> tuple[Any, str]:
    """Return the report of ``tests.bench.NAME``, and its table; devices and mounts in *backing*."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.bench.{name}", *flags, "--backing", str(backing)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(backing)},  # where it mounts
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr
