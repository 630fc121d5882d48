"""What pyproject.toml cannot say: data files and long description are made at the build."""

import sys
from pathlib import Path

# Imported first: it brings a distutils of its own, which Python 3.12 no longer has.
from setuptools import setup  # isort: skip
from distutils.command.install_data import install_data

sys.path.insert(0, str(Path(__file__).parent))

from make.long_description import long_description  # isort: skip


class MadeFiles(install_data):
    """Makes man pages and completion from the parsers, and takes unit and docs with them."""

    def run(self) -> None:
        """Write them to the build's own place, then into the wheel."""
        from make.shipped_files import written

        made = Path(self.get_finalized_command("build").build_base).absolute() / "shipped"
        self.data_files = list(written(made).items())
        super().run()


# The list is not empty, or setuptools would not ask for data files at all.
setup(
    cmdclass={"install_data": MadeFiles},
    data_files=[("share/doc/kvfs", ["README.md"])],
    long_description=long_description(),
    long_description_content_type="text/markdown",
)
