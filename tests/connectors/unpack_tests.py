"""Unpack the projects' own tests from their sdists: ``unpack_tests.py DEST SDIST...``.

``DEST/lmcache`` and ``DEST/vllm`` then are directories in which pytest runs them.
"""

import fnmatch
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Final

KEEP: Final = {
    "lmcache": ["pytest.ini", "tests/*.py", "tests/*.yaml"],
    # tests/conftest.py would import the engine.
    "vllm": ["tests/v1/kv_offload/*.py"],
}
"""Sdist's project name: patterns of its files (``*`` matches ``/`` too)."""


def unpack(sdist: Path, dest: Path) -> None:
    """Unpack what is kept of one sdist; its files lie below ``NAME-VERSION/``."""
    project = sdist.name.split("-")[0]
    with tarfile.open(sdist) as archive:
        for member in archive:
            name = member.name.partition("/")[2]
            if member.isfile() and any(fnmatch.fnmatchcase(name, one) for one in KEEP[project]):
                path = dest / project / name
                path.parent.mkdir(parents=True, exist_ok=True)
                source = archive.extractfile(member)
                assert source is not None
                path.write_bytes(source.read())
    # As packages: without these pytest would take `tests` for somebody else's.
    for package in ("tests", "tests/v1"):
        (dest / project / package / "__init__.py").touch()


if __name__ == "__main__":
    destination = Path(sys.argv[1])
    shutil.rmtree(destination, ignore_errors=True)
    for argument in sys.argv[2:]:
        unpack(Path(argument), destination)
